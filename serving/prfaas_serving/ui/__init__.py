"""The page for operators: its history, its state as JSON, its files."""

#: Where the page reads its state; unlike its files it needs the token.
STATE_PATH = "/ui/state"
