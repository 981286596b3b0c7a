"""What the report has besides numbers: its words and its style."""

FACTS = ("cpu", "cores", "isa", "system", "python", "torch", "khot", "native", "commit")
HIDDEN = {*FACTS, "bench", "load"}  # the table of machines says these
ABOUT = {
    "certified_pruning": "Bounds of a pruned transformer on 200 images of MNIST, by `examples/certified_pruning.py`: shares and means.",
    "distributed": "Scores that are spread over processes, by `python -m bench distributed`.",
    "chaotic": "Recovered terms of the polynomial systems of dysts, by `python -m bench applications sindy --table chaotic`.",
}
_CANVAS = "python examples/canvas.py --records bench/results/vision/canvas.jsonl"
_REDUCTION = "python examples/token_reduction.py WEIGHTS --records bench/results/vision/reduction.jsonl"
VISION = {
    "runs": (
        "Top-1 and top-5 in per cent, from the records of `khot train`. A row with a command was not run; the command runs it.",
        "bench/vision/networks.sh bench/results/vision",
    ),
    "relaxations": (
        "One model with several matrix methods.",
        'khot train --recipe fashion_mnist --model topk_dynamic --model_options \'{"method": "softsort"}\'',
    ),
    "canvas": ("A digit on a cluttered canvas: the scorer must learn where to look.", _CANVAS),
    "reduction": ("Accuracy that a ViT loses when it drops tokens.", _REDUCTION),
    "throughput": ("Images and training steps per second with dropped tokens.", "python -m bench vision throughput"),
    "overhead": ("What the training engine costs beside a plain loop.", "python -m bench vision overhead"),
    "minilm": ("A sentence encoder that drops tokens.", "python -m bench vision minilm"),
}

STYLE = """
:root { --bg: #fff; --fg: #1b1f2a; --muted: #5b6275; --line: #d8dce8; --head: #f1f3fa; --accent: #3f51b5; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #14161f; --fg: #e8eaf2; --muted: #a2a9bd; --line: #353a4d; --head: #1f2330; --accent: #9fa8ff; } }
body { margin: auto; max-width: 1200px; padding: 1rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.4rem; border-bottom: 1px solid var(--line); } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem .9rem; } a { color: var(--accent); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: .18rem .5rem; text-align: left; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 6rem; }
th { background: var(--head); } .note { color: var(--muted); font-size: .88rem; }
img { display: block; max-width: 100%; height: auto; margin: 1rem 0; background: #fff; } code { font-size: .92em; }
"""
