"""Search for maths in a text, and its conversion from variants of LaTeX and Unicode signs to one notation.

The module is pure, and its cost is linear in the length of the text. Nothing is evaluated here.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from reward_service.verifiers.answers import boxed, closing, folded, hedged, last_match

SIGNS = str.maketrans(
    {"–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
     "∙": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "∶": ":", "√": r"\sqrt ", "∛": r"\sqrt[3] ",
     "∜": r"\sqrt[4] ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
     "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": "=", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
     "∉": r"\notin ",
     "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "º": r"^\circ ", "′": "'",
     "µ": r"\mu ", "Ø": r"\emptyset ", "℃": r"^\circ C", "℉": r"^\circ F", "∅": r"\emptyset ",
     "∠": r"\angle ", "△": r"\triangle ", "→": r"\to ", "⇒": r"\Rightarrow ", "≪": r"\ll ", "≫": r"\gg ",
     "∼": r"\sim ", "∝": r"\propto ", "≡": r"\equiv ", "≅": r"\cong ", "∨": r"\lor ", "∧": r"\land ",
     "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": r"\langle ", "⟩": r"\rangle ",
     "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
     "…": r"\ldots ", "\u00a0": "~", "\u2006": "~", "\u2009": "~", "\u202f": "~"}
    | {letter: rf"\{unicodedata.name(letter).split()[-1].lower()} " for letter in "αβγδεζηθικλμνξπρστυφχψω"}
)  # fmt: skip
RAISED, LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "₀₁₂₃₄₅₆₇₈₉₊₋₍₎"
RAISED_OR_LOWERED = re.compile(rf"([{RAISED}]+)|([{LOWERED}]+)")
VULGAR = re.compile("[¼½¾⅐-⅞↉]")
FRACTION_SIGN = re.compile(r"(\d+)⁄(\d+)")
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|csc|sec|log|ln|exp"
SHORT_UNIT = "[mgshltLNJWV]"
NO_ANGLE, NO_COMMA = r"(?:(?!\\[lr]angle).)*+", r"(?:(?!\\[lr]angle)[^,])*+"
ONE_SIGN = r"\d|[a-zA-Z]|\\(?:pi|theta|alpha|beta|lambda)(?![a-zA-Z])"
REPLACED: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?"), ""),
    (re.compile(r"\\(?:[dtc]|nice|s)frac(?![a-zA-Z])"), r"\\frac"),
    # Commands that only affect the layout.
    (re.compile(r"\A(\*\*|__|`)([^*_`]+)\1\Z"), r"\2"),
    (re.compile(r"(?<=\S)\s*\\(?:blacksquare|square|Box|qed)\s*\Z"), ""),
    (re.compile(r"\\(?:fcolorbox\s*\{[^{}]*\}|colorbox|(?:text)?color)\s*(?:\[\w*\])?\s*\{[^{}]*\}"), " "),
    (re.compile(r"\\(?:[hv]space|(?:h|v)?phantom|label|tag)\*?\s*\{[^{}]*\}"), " "),
    (re.compile(r"\\(?:emph|underline|uline|ensuremath|smash|mathop|mathord|mathstrut|strut|displaystyle|textstyle"
                r"|scriptstyle|limits|nolimits|nonumber|notag|bfseries|itshape|bf|it|em|tiny|small|normalsize|large|Large"
                r"|LARGE|huge|Huge|hfill)(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:begin|end)\{(?:aligned|align\*?|gathered|split|equation\*?|center)\}"), " "),
    (re.compile(r"\\(?:\\|cr)\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]|\\(?:cr|newline)(?![a-zA-Z])"), r"\\\\"),
    (re.compile(r"\\hline(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:mathrm|mathsf|mathtt|mathup|textbf|textit|textrm|textsf|textsl|textup|textnormal|texttt"
                r"|operatorname\*?|mbox|hbox)(?=\s*\{)"), r"\\text"),
    (re.compile(r"\{\s*\\(?:rm|sf|tt)(?![a-zA-Z])\s*([^{}]*)\}"), r"\\text{\1}"),
    (re.compile(r"\\(?:rm|sf|tt)\s*(?=\{)"), r"\\text"),
    (re.compile(r"(?<=[\d)}])\s*\\frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}"),
     r" \\text{\1/\2}"),
    (re.compile(r"(?<=\d)\s*\^\s*\{?\s*\\text\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?"), ""),
    # Two vectors keep their order.
    (re.compile(r"\\(?:overrightarrow|vec|mathbf|boldsymbol|bm|hat)\s*\{?([a-zA-Z])\}?(?=\s*\\times\s*"
                r"\\(?:overrightarrow|vec|mathbf|boldsymbol|bm|hat)(?![a-zA-Z]))"), r"\\vec{\1}"),
    (re.compile(r"(\\vec\{[a-zA-Z]\}\s*\\times\s*)\\(?:overrightarrow|vec|mathbf|boldsymbol|bm|hat)\s*\{?([a-zA-Z])\}?"),
     r"\1\\vec{\2}"),
    (re.compile(r"\\(?:mathbf|mathit|boldsymbol|bm|mathnormal)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(?:text|mathbf|mathit|boldsymbol|bm|mathnormal)\s*(?=\{\s*\{)"), ""),
    # Upright letters, functions and constants stay the same, except for a unit's letter after a value.
    (re.compile(rf"\\text\s*\{{\s*({FUNCTIONS})\s*\}}"), r"\\\1 "),
    (re.compile(r"\\text\s*\{\s*(\\[a-zA-Z]+)\s*\}"), r"\1 "),
    (re.compile(r"(?<![\d)}/])\\text\s*\{\s*([a-zA-Z])\s*\}"), r" \1 "),
    (re.compile(rf"\\text\s*\{{\s*((?!{SHORT_UNIT})[a-zA-Z])\s*\}}"), r" \1 "),
    (re.compile(rf"\\text\s*\{{(?!{SHORT_UNIT}(?:/{SHORT_UNIT})?\}})((?:[\d+*/^=().-]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]))+)\}}"),
     r"\1"),
    (re.compile(r"\\text\s*\{\s*([-+]?[\d.,/]+\s*\\?%?)\s*\}"), r"\1"),
    (re.compile(r"\A\s*\\text\s*\{\s*([-+]?\\?\$?\d[^{}]*)\}\s*\Z"), r"\1"),
    (re.compile(rf"(?<![\\a-zA-Z])({FUNCTIONS}|sqrt|pi|infty)(?![a-zA-Z])"), r"\\\1 "),
    # Thousands.
    (re.compile(r"\A[-+]?\d{1,3}(?:(?: \d{3})+|(?:'\d{3})+|(?:\.\d{3}){2,})\Z"),
     lambda match: re.sub(r"[ '.]", ",", match[0])),
    (re.compile(r"(?<=\d)(?:,|\{,\})(?:\\!)+\s*(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<=\d)\{,\}(?=\d{3})"), ","),
    (re.compile(r"(?<=\d)(?:(?<!\\)\\[,:; ]|~)\s*(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<!\\)\\(?:[,:;> ]|q?quad(?![a-zA-Z]))|~"), " "),
    (re.compile(r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\leq(?:slant)?(?![a-zA-Z])|<="), r"\\le "),
    (re.compile(r"\\geq(?:slant)?(?![a-zA-Z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![a-zA-Z])|\\not\s*=|(?<![\w)}!])!="), r"\\ne "),
    (re.compile(r"\\(?:approx|simeq|doteq)(?![a-zA-Z])"), "="),
    # A point, and intervals with brackets that face outwards.
    (re.compile(rf"\\langle(?![a-zA-Z])({NO_COMMA},{NO_ANGLE})\\rangle(?![a-zA-Z])"), r"(\1)"),
    (re.compile(r"(\A|\\cup|\\in|=)\s*\](?=[^\[\]()]*,)"), r"\1("),
    (re.compile(r"(?<=.)\[(?=\s?(?:\Z|\\cup))"), ")"),
    (re.compile(r"\\(?:lbrace)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\[lr]?vert(?![a-zA-Z])"), "|"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\^\s*\{?\s*\\degree\s*\}?|\\degree(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\text\s*\{\s*(and|or)\s*\}|(?<![a-zA-Z])(and|or)(?![a-zA-Z])"), " , "),
    (re.compile(r",\s*,"), ","),
    (re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\(?:R|reals)(?![a-zA-Z])"), r"(-\\infty,\\infty)"),
    # Everyone except TeX reads x^10 as x to the tenth.
    (re.compile(r"\^(\d{2,})"), r"^{\1}"),
    (re.compile(rf"\\frac\s*({ONE_SIGN})"), r"\\frac{\1}"),
    (re.compile(rf"(\\frac\s*\{{[^{{}}]*\}})\s*({ONE_SIGN})"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\[\d+\])?\s*(\d+|[a-zA-Z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\^\s*\{?\s*\\prime(?![a-zA-Z])\s*\}?"), "'"),
]  # fmt: skip
MOST_WRAPPINGS = 8  # nested boxes and brackets that are removed
POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
IN_WORDS = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?({'|'.join(POWERS)})\b\s*\}}?")
HEDGE = re.compile(
    r"\A\s*(?:approximately|about|roughly|exactly|simply|just|equal to|\\approx|:)\s+", re.IGNORECASE
)
FULL_STOP = re.compile(r"(?<![.,;:])[.,;:]\Z")
OVER = re.compile(r"\\over(?![a-zA-Z])")
MATHS_SIGN = re.compile(r"\\.|\$\$?", re.DOTALL)
CLOSED_BY = {"$$": "$$", r"\[": r"\]", r"\(": r"\)"}
INLINE = re.compile(r"(?!\s)[^$\n]++(?<!\\)\$")
NUMBER = re.compile(
    r"(?<![\w.,])[-+−]?[$€£¥]?(?:\d{1,3}(?:,\d{3})++(?:\.\d++)?|\d++(?:\.\d++)?|\.\d++)(?:[eE][-+]?\d{1,3})?"
    r"(?:\s?/\s?\d++|\s\d++/\d++|:\d++)?(?:\s?\\?%)?(?!\w)"
)
BECAUSE = re.compile(r",? (?:because|since|as|so|which|when|where|after|for|given)\b.*", re.DOTALL)


def tidy(text: str) -> str:
    """Return the maths in `text` in one notation, without the signs that mark its beginning and end."""
    text = one_spaced(_in_ascii(text))
    for _ in range(MOST_WRAPPINGS):
        text = boxed(text) or text
    text = undollared(text)
    for pattern, replacement in REPLACED:
        text = pattern.sub(replacement, text)
    text = one_spaced(IN_WORDS.sub(lambda match: rf"\times 10^{{{POWERS[match[1]]}}}", text))
    parts = OVER.split(text.removeprefix("{").removesuffix("}"))
    if len(parts) == 2 and not any(brace in part for part in parts for brace in "{}"):
        text = rf"\frac{{{parts[0].strip()}}}{{{parts[1].strip()}}}"
    text = text.replace("**", "^").rstrip("\\ ").strip("* ")
    return unwrapped(FULL_STOP.sub("", text).strip())


def _in_ascii(text: str) -> str:
    """Return the text with LaTeX commands in place of Unicode signs."""
    if text.isascii():
        return text
    text = VULGAR.sub(lambda match: FRACTION_SIGN.sub(r"\\frac{\1}{\2}", _compatible(match[0])), text)
    text = RAISED_OR_LOWERED.sub(
        lambda match: f"{'^' if match[1] else '_'}{{{_compatible(match[0])}}}".replace("−", "-"), text
    )
    return folded(text.translate(SIGNS))


def _compatible(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs)


def one_spaced(text: str) -> str:
    """Return the text with one space for each run of white space.

    TeX reads the result in the same way, and patterns then need no backtracking over runs of white space.
    """
    return " ".join(text.split())


def formulas(text: str) -> Iterator[tuple[int, str]]:
    """Yield the end position and the text of each formula in `$…$`, `$$…$$`, `\\(…\\)` or `\\[…\\]`, in
    order."""
    position = 0
    unclosed: set[str] = set()
    while (sign := MATHS_SIGN.search(text, position)) is not None:
        opening, position = sign[0], sign.end()
        ending = CLOSED_BY.get(opening)
        if ending is not None and ending not in unclosed:
            if (end := text.find(ending, position + 1)) < 0:
                unclosed.add(ending)
                continue
            yield end + len(ending), text[position:end]
            position = end + len(ending)
        elif opening == "$" and (inline := INLINE.match(text, position)) is not None:
            yield inline.end(), text[position : inline.end() - 1]
            position = inline.end()


def undollared(text: str) -> str:
    """Return the text without `$…$`, `\\(…\\)` or `\\[…\\]` around the whole."""
    for opening, ending in (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ("$", "$")):
        if len(text) >= len(opening) + len(ending) and text.startswith(opening) and text.endswith(ending):
            inner = text[len(opening) : -len(ending)]
            if opening not in inner:
                return inner.strip()
    return text


def unwrapped(text: str) -> str:
    """Return the text without braces around the whole text. Round brackets around the whole text are removed
    too, unless it has a comma."""
    for _ in range(MOST_WRAPPINGS):
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1].strip()
    for _ in range(MOST_WRAPPINGS):
        if text.startswith("(") and text.endswith(")") and "," not in text and one_bracket(text):
            text = text[1:-1].strip()
    return text


def last_maths(text: str) -> str | None:
    """Return the last formula or number of a text without a marked answer, or None if it has neither.

    If the text has both, the one that comes later counts.
    """
    formula, number = deque(formulas(text), maxlen=1), last_match(NUMBER, text)
    if formula and (number is None or number.end() <= formula[0][0]):
        return formula[0][1]
    return number[0] if number is not None else None


def said_maths(sentence: str) -> str:
    """Return the answer after "the answer is": the first formula, else the text before a reason."""
    for _, formula in formulas(sentence):
        return formula
    return BECAUSE.sub("", HEDGE.sub("", one_spaced(sentence)))


def one_bracket(text: str, opening: str = "(", ending: str = ")") -> bool:
    """Return whether the last character of the text closes the bracket at its beginning.

    Any bracket of `ending` may close any bracket of `opening`, as in half-open intervals.
    """
    depth = 0
    for index, character in enumerate(text):
        depth += (character in opening) - (character in ending)
        if depth == 0:
            return index == len(text) - 1
    return False


# --- numbers as people write them --------------------------------------------------------------------


LONGEST_NUMBER = 400  # characters; `int` of a text takes time quadratic in its length
LARGEST_EXPONENT = 400
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
PLAIN = re.compile(rf"([-+]?)\s*(?:({WHOLE})(\.[0-9]*)?|(\.[0-9]+))(?:[eE]([-+]?[0-9]{{1,4}}))?")
POWER_OF_TEN = re.compile(
    r"\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([-+]?[0-9]{1,4})\s*\}|([-+]?[0-9]))"
)
BARE_POWER = re.compile(r"\A([-+]?)\s*(10\s*\^)")
FRACTION = re.compile(r"([-+]?)\s*\\frac\s*\{\s*([-+]?[0-9.]+)\s*\}\s*\{\s*([-+]?[0-9.]+)\s*\}")
SLASHED = re.compile(rf"([-+]?{WHOLE})\s*/\s*({WHOLE})")
MIXED = re.compile(
    rf"([-+]?)\s*({WHOLE})\s*(?:\\frac\s*\{{\s*([0-9]+)\s*\}}\s*\{{\s*([0-9]+)\s*\}}|\s([0-9]+)/([0-9]+))"
)
REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{([0-9]+)\}")
RATIO = re.compile(r"([0-9]+)\s*:\s*([0-9]+)")
BASED = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]{1,2})\}?")
PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|percent\b)\s*\Z")
MONEY = re.compile(r"\A([-+]?)\s*(?:\\?\$|€|£|¥|\\pounds)\s*|\s*(?:\\\$|€|£|¥)\s*\Z")
UNIT_IN_TEXT = re.compile(
    r"\s*\\text\s*\{([^{}]*)\}\s*(?:\^\s*\{?([0-9])\}?)?\s*(?:/\s*\\text\s*\{([^{}]*)\})?\s*\Z"
)
UNIT_IN_WORDS = re.compile(r"(?<=[0-9)}])\s+([a-zA-Z][a-zA-Z./ ]*)(?:\^\s*\{?([0-9])\}?)?\s*\Z")
DEGREES = re.compile(r"\s*\^\\circ\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF]))?\s*\Z")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma "
    "tau upsilon phi varphi chi psi omega"
)
GREEK = frozenset(_GREEK.split())
_NAMES = (
    "sin cos tan cot sec csc log ln exp lim max min mod gcd lcm pi if for infinity base squared cubed "
    "factorial modulo negative imaginary inverse reciprocal root sqrt det dim deg rank undefined unknown"
)
NAMES_IN_MATHS = GREEK.union(_NAMES.split())
SMALL_WORDS = frozenset(("a", "an", "the", "of", "in", "on", "at", "by", "per", "each"))
VARIABLES = frozenset("abcdfgkmnxyz")
NO_UNIT = ",;()=+*^\\或和及不非"
THING = re.compile(r"(?=.*[aeiouyAEIOUY])(?=.*[b-df-hj-np-tv-zB-DF-HJ-NP-TV-Z])[a-zA-Z'’]{3,}")


_UNITS = (
    "mm cm dm m km inch ft yd mi ms s min h day week mg g kg t lb oz ml cl l degree radian cent dollar "
    "N J kJ W kW V Pa kPa Hz kHz a.m p.m"
)
UNITS = frozenset(_UNITS.split())
_LENGTHS = frozenset(("mm", "cm", "dm", "m", "km", "inch", "ft", "yd", "mi"))
_TIMES = frozenset(("ms", "s", "min", "h", "day", "week"))
_DROPPED = "st nd rd th sq cu ha mol eV rpm mpg ppm yr pt px dB kWh kcal cal gal qt pct"
DROPPED = frozenset(_DROPPED.split())
"""Known units and endings that are not compared: answer and truth may differ in them."""
LONG_NAMES = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "decimeter": "dm",
    "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "in": "inch", "inche": "inch",
    "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "millisecond": "ms", "second": "s", "sec": "s",
    "minute": "min", "hour": "h", "hr": "h", "milligram": "mg", "gram": "g", "kilogram": "kg", "tonne": "t",
    "pound": "lb", "ounce": "oz", "milliliter": "ml", "millilitre": "ml", "liter": "l", "litre": "l",
    "mL": "ml", "L": "l", "deg": "degree", "rad": "radian",
    "mph": "mi/h", "kph": "km/h", "kmh": "km/h", "am": "a.m", "pm": "p.m", "AM": "a.m", "PM": "p.m",
    "newton": "N", "joule": "J", "watt": "W", "volt": "V", "pascal": "Pa", "hertz": "Hz",
}  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """A text that was split into its body, its unit and its percent sign."""

    body: str
    unit: str = ""  # empty for no unit, or an unknown one
    percent: bool = False


def quantity(text: str) -> Quantity:
    """Split a tidied text into body, unit and percent sign.

    `$5` is 5 dollars. Other currency signs are dropped.
    """
    found = _measured(MONEY.sub(lambda match: match[1] or "", text).strip())
    in_dollars = "$" in text and MONEY.search(text) and not found.unit
    return replace(found, unit="dollar") if in_dollars else found


def _measured(text: str) -> Quantity:
    if match := PERCENT.search(text):
        return Quantity(text[: match.start()].rstrip("\\").strip(), percent=True)
    if (match := DEGREES.search(text)) and not TRIGONOMETRIC.search(text):
        scale = match[1] or match[2]
        return Quantity(text[: match.start()].strip(), f"°{scale}" if scale else "degree")
    match = UNIT_IN_TEXT.search(text)
    # `57 \text{ or 58}` names a second answer and not a unit.
    if match and match.start() > 0 and _names_a_unit(match[1]):
        per = f"/{match[3].strip()}" if match[3] else ""
        return Quantity(text[: match.start()].strip(), unit_of(match[1] + per, match[2]))
    if (match := UNIT_IN_WORDS.search(text)) and _names_a_unit(match[1]):
        return Quantity(text[: match.start()].strip(), unit_of(match[1], match[2]))
    return Quantity(text)


def _names_a_unit(words: str) -> bool:
    """Return whether `words` are known units or names of things.

    Other letters must stay in the text, because they may be variables, constants, a list, a count, or a hint
    at another answer.
    """
    if any(unicodedata.numeric(sign, None) is not None or sign in NO_UNIT for sign in words) or hedged(words):
        return False
    if unit_of(words):
        return True
    parts = [part.strip(".") for part in re.split(r"[\s/-]+", words) if part.strip(".")]
    named = [part for part in parts if part not in SMALL_WORDS]
    return bool(named) and all(
        _short(part) in UNITS or part.removesuffix("s") in DROPPED or _is_a_thing(part) for part in named
    )


def _is_a_thing(word: str) -> bool:
    """Return whether the letters are a word, and not a product of variables such as `abc` or `xyz`."""
    spoken = THING.fullmatch(word) or not word.isascii()
    product = len(word) <= 4 and {*word} <= VARIABLES
    return bool(spoken) and not product and word.lower() not in NAMES_IN_MATHS


def unit_of(words: str, power: str | None = None) -> str:
    """Return the short name of the unit in `words`, or an empty text for other words.

    Known units are single units (`kg`), their powers (`square meters`), and speeds (`km/h`)."""
    words = " ".join(words.replace(" per ", "/").replace("²", "^2").replace("³", "^3").split()).strip(". ")
    for prefix, exponent in (("square ", "2"), ("sq ", "2"), ("sq. ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if words.startswith(prefix):
            words, power = words.removeprefix(prefix), exponent
    names = "/".join(_short(word.strip()) for word in words.split("/")).split("/")
    if names[0].partition("^")[0] not in UNITS or len(names) > 2:
        return ""
    if len(names) == 2 and not (names[0] in _LENGTHS and names[1] in _TIMES):
        return ""
    return "/".join(names) + (f"^{power}" if power not in (None, "1") else "")


def _short(word: str) -> str:
    forms = (word, word.removesuffix("s"), word.lower(), word.lower().removesuffix("s"))
    return next((LONG_NAMES.get(form, form) for form in forms if form in UNITS or form in LONG_NAMES), word)


def number(text: str) -> Fraction | None:
    """Return the value of a tidied text that is one number, or None."""
    text = BARE_POWER.sub(r"\g<1>1\\times \g<2>", text.strip())
    if not text or len(text) > LONGEST_NUMBER:
        return None
    try:
        plain = _plain(text)
        return _fraction(text) if plain is None else plain
    except (ValueError, ZeroDivisionError):
        return None


def is_decimal(text: str) -> bool:
    """Return whether the number has a decimal point or an exponent, so that it may have been rounded."""
    return "." in text or "e" in text.lower()


def based(text: str) -> tuple[str, str] | None:
    """Return (digits, base) of a text such as `101_2`, or None."""
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
    times = POWER_OF_TEN.fullmatch(rest := text[match.end() :])
    power = int(exponent or 0) + (int(times[1] or times[2]) if times else 0)
    if (rest and times is None) or abs(power) > LARGEST_EXPONENT:
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
