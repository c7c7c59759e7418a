"""Numbers as people write them: signs, decimals, fractions, mixed and repeating ones, percents and units.

Everything is exact (`Fraction`). What is no single number is none: the caller then compares it as maths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from reward_service.verifiers.answers import hedged

LONGEST_NUMBER = 400
"""Characters; `int` of a text takes time that grows with the square of its length."""
LARGEST_EXPONENT = 400
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
PLAIN = re.compile(rf"([-+]?)\s*(?:({WHOLE})(\.[0-9]*)?|(\.[0-9]+))(?:[eE]([-+]?[0-9]{{1,4}}))?")
POWER_OF_TEN = re.compile(
    r"\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([-+]?[0-9]{1,4})\s*\}|([-+]?[0-9]))"
)
FRACTION = re.compile(r"([-+]?)\s*\\frac\s*\{\s*([-+]?[0-9.]+)\s*\}\s*\{\s*([-+]?[0-9.]+)\s*\}")
SLASHED = re.compile(rf"([-+]?{WHOLE})\s*/\s*({WHOLE})")
MIXED = re.compile(
    rf"([-+]?)\s*({WHOLE})\s*(?:\\frac\s*\{{\s*([0-9]+)\s*\}}\s*\{{\s*([0-9]+)\s*\}}|\s([0-9]+)/([0-9]+))"
)
REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{([0-9]+)\}")
RATIO = re.compile(r"([0-9]+)\s*:\s*([0-9]+)")
BASED = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]{1,2})\}?")
PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*percent\s*\}|percent\b)\s*\Z")
MONEY = re.compile(r"\A([-+]?)\s*(?:\\?\$|€|£|¥|\\pounds)\s*|\s*(?:\\\$|€|£|¥)\s*\Z")
UNIT_IN_TEXT = re.compile(
    r"\s*\\text\s*\{([^{}]*)\}\s*(?:\^\s*\{?([0-9])\}?)?\s*(?:/\s*\\text\s*\{([^{}]*)\})?\s*\Z"
)
UNIT_IN_WORDS = re.compile(r"(?<=[0-9)}])\s+([a-zA-Z][a-zA-Z./ ]*)(?:\^\s*\{?([0-9])\}?)?\s*\Z")
DEGREES = re.compile(r"\s*\^\\circ\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF]))?\s*\Z")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
NAMES_IN_MATHS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "log",
        "ln",
        "exp",
        "lim",
        "max",
        "min",
        "mod",
        "gcd",
        "lcm",
        "pi",
        "if",
        "for",
    ]
)


@dataclass(frozen=True)
class MeasureUnit:
    """`size` of one of them in the base unit of its kind; `kind` is empty for what merely names things."""

    kind: str
    size: Fraction


def _units() -> dict[str, MeasureUnit]:
    lengths = {"mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": "1", "km": "1000", "inch": "127/5000",
               "ft": "381/1250", "yd": "1143/1250", "mi": "201168/125"}  # fmt: skip
    times = {"ms": "1/1000", "s": "1", "min": "60", "h": "3600", "day": "86400", "week": "604800"}
    masses = {"mg": "1/1000", "g": "1", "kg": "1000", "t": "1000000", "lb": "45359237/100000",
              "oz": "45359237/1600000"}  # fmt: skip
    volumes = {"ml": "1/1000000", "cl": "1/100000", "l": "1/1000"}
    table = {name: MeasureUnit("length", Fraction(size)) for name, size in lengths.items()}
    table |= {f"{name}^2": MeasureUnit("area", unit.size**2) for name, unit in list(table.items())}
    table |= {
        f"{name}^3": MeasureUnit("volume", unit.size**3)
        for name, unit in list(table.items())
        if "^" not in name
    }
    speeds = {
        f"{far}/{long}": MeasureUnit("speed", Fraction(lengths[far]) / Fraction(times[long]))
        for far in lengths
        for long in times
    }
    table |= speeds
    table |= {"mph": speeds["mi/h"], "kph": speeds["km/h"], "kmh": speeds["km/h"]}
    table |= {name: MeasureUnit("time", Fraction(size)) for name, size in times.items()}
    table |= {name: MeasureUnit("mass", Fraction(size)) for name, size in masses.items()}
    table |= {name: MeasureUnit("volume", Fraction(size)) for name, size in volumes.items()}
    table |= {
        "degree": MeasureUnit("angle", Fraction(1)),
        "°C": MeasureUnit("°C", Fraction(1)),
        "°F": MeasureUnit("°F", Fraction(1)),
    }
    table |= {"cent": MeasureUnit("money", Fraction(1, 100)), "dollar": MeasureUnit("money", Fraction(1))}
    return table


UNITS = _units()
LONG_NAMES = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "decimeter": "dm",
    "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "in": "inch", "inche": "inch",
    "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "millisecond": "ms", "second": "s", "sec": "s",
    "minute": "min", "hour": "h", "hr": "h", "milligram": "mg", "gram": "g", "kilogram": "kg", "tonne": "t",
    "pound": "lb", "ounce": "oz", "milliliter": "ml", "millilitre": "ml", "liter": "l", "litre": "l",
    "mL": "ml", "L": "l", "deg": "degree",
}  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """What is left of a text without its unit and percent sign, and these."""

    body: str
    unit: MeasureUnit | None = None
    percent: bool = False


def quantity(text: str) -> Quantity:
    """Part a tidied text into body, unit and percent sign. A currency sign is dropped: `$5` is 5."""
    text = MONEY.sub(lambda match: match[1] or "", text).strip()
    if match := PERCENT.search(text):
        return Quantity(text[: match.start()].rstrip("\\").strip(), percent=True)
    if (match := DEGREES.search(text)) and not TRIGONOMETRIC.search(text):
        scale = match[1] or match[2]
        return Quantity(text[: match.start()].strip(), UNITS[f"°{scale}" if scale else "degree"])
    match = UNIT_IN_TEXT.search(text)
    # `57 \text{ or 58}` names a second answer, no unit.
    if match and match.start() > 0 and _names_a_unit(match[1]):
        per = f"/{match[3].strip()}" if match[3] else ""
        return Quantity(text[: match.start()].strip(), unit_of(match[1] + per, match[2]))
    if match := UNIT_IN_WORDS.search(text):
        words = match[1].split()
        known = unit_of(match[1], match[2])
        if known.kind or (
            all(len(word) > 2 for word in words) and not NAMES_IN_MATHS & set(words) and not hedged(match[1])
        ):
            return Quantity(text[: match.start()].strip(), known)
    return Quantity(text)


def _names_a_unit(words: str) -> bool:
    """Not so what lists things, counts, or says that another answer may be the right one."""
    return not any(character.isdigit() or character in ",;()" for character in words) and not hedged(words)


def unit_of(words: str, power: str | None = None) -> MeasureUnit:
    """The unit that `words` name (`square meters`, `km/h`, `apples`); of no kind when it is none we know."""
    words = " ".join(words.replace(" per ", "/").replace("²", "^2").replace("³", "^3").split()).strip(". ")
    for prefix, exponent in (("square ", "2"), ("sq ", "2"), ("sq. ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if words.startswith(prefix):
            words, power = words.removeprefix(prefix), exponent
    name = "/".join(_short(word.strip()) for word in words.split("/"))
    return UNITS.get(f"{name}^{power}" if power not in (None, "1") else name, MeasureUnit("", Fraction(1)))


def _short(word: str) -> str:
    for form in (word, word.removesuffix("s"), word.lower(), word.lower().removesuffix("s")):
        if form in UNITS:
            return form
        if form in LONG_NAMES:
            return LONG_NAMES[form]
    return word


def number(text: str) -> Fraction | None:
    """The value of a tidied text that is one number; None when it is anything else."""
    text = text.strip()
    if not text or len(text) > LONGEST_NUMBER:
        return None
    try:
        plain = _plain(text)
        return _fraction(text) if plain is None else plain
    except (ValueError, ZeroDivisionError):
        return None


def is_decimal(text: str) -> bool:
    """Whether it was written with a decimal point or an exponent, and so may have been rounded."""
    return "." in text or "e" in text.lower()


def based(text: str) -> tuple[str, str] | None:
    """(digits, base) of `101_2`."""
    match = BASED.fullmatch(text.replace(" ", ""))
    return (match[1], match[2]) if match else None


def ratio(text: str) -> Fraction | None:
    match = RATIO.fullmatch(text.strip())
    return Fraction(int(match[1]), int(match[2])) if match and int(match[2]) else None


def _plain(text: str) -> Fraction | None:
    match = PLAIN.match(text)
    if match is None:
        return None
    sign, whole, decimals, bare, exponent = match.groups()
    rest = text[match.end() :]
    power = int(exponent or 0)
    if rest:
        times = POWER_OF_TEN.fullmatch(rest)
        if times is None:
            return None
        power += int(times[1] or times[2])
    if abs(power) > LARGEST_EXPONENT:
        return None
    digits = (whole or "0").replace(",", "") + (decimals or bare or "")
    value = Fraction(digits.rstrip(".")) * Fraction(10) ** power
    return -value if sign == "-" else value


def _fraction(text: str) -> Fraction | None:
    if match := FRACTION.fullmatch(text):
        value = Fraction(match[2]) / Fraction(match[3])
        return -value if match[1] == "-" else value
    if match := SLASHED.fullmatch(text):
        return Fraction(match[1].replace(",", "")) / Fraction(match[2].replace(",", ""))
    if match := MIXED.fullmatch(text):
        part = Fraction(int(match[3] or match[5]), int(match[4] or match[6]))
        value = int(match[2].replace(",", "")) + part
        return -value if match[1] == "-" else value
    if match := REPEATING.fullmatch(text):
        sign, whole, fixed, again = match.groups()
        value = Fraction(f"{whole or 0}.{fixed or 0}")
        value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(fixed))
        return -value if sign == "-" else value
    return None
