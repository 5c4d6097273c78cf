"""Numbers of things in messages: ``1 client``, ``1,000 clients``."""


def plural(number: float, noun: str) -> str:
    """Return a number and the noun that it counts.

    Example:
        >>> from bayesfed.data.plural import plural
        >>> plural(1, "row"), plural(1000, "row"), plural(0, "entry")
        ('1 row', '1,000 rows', '0 entries')
    """
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else several}"
