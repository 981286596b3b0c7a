"""One file of figures per benchmark: ``draw(rows) -> {name: figure}``."""
