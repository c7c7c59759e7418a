"""Figures as text."""


def clock_text(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
