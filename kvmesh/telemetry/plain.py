"""Text of others, fit for a log line and a terminal. Used wherever what a peer wrote is shown."""


def plain(text: str) -> str:
    """The same without line ends, escape codes and whatever else is not seen: each becomes a space."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
