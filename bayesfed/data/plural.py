"""Numbers of things in messages: ``1 client``, ``1,000 clients``."""


def plural(number: float, one: str, several: str = "") -> str:
    """Return a number with the words that it counts.

    Args:
        number: the number.
        one: the words for one.
        several: the words for any other number; by default with an "s", or "ies" in place of "y".

    Example:
        >>> from bayesfed.data.plural import plural
        >>> plural(1, "row"), plural(1000, "row"), plural(0, "entry")
        ('1 row', '1,000 rows', '0 entries')
        >>> plural(1, "round is", "rounds are"), plural(3, "round is", "rounds are")
        ('1 round is', '3 rounds are')
    """
    several = several or (f"{one[:-1]}ies" if one.endswith("y") else f"{one}s")
    return f"{number:,} {one if number == 1 else several}"
