"""An SVG drawing as PNG, by the resvg library (extra `png`), which needs no browser and no graphics system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import ConfigError, SetupError

FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts", "/Library/Fonts",
                "/System/Library/Fonts")  # fmt: skip
SCALE = 2  # pixels a unit of the drawing, for screens and paper


def png(svg: str, folders: Sequence[str] = FONT_FOLDERS) -> bytes:
    """The drawing at twice its size. Raises ConfigError without the library, SetupError without any font."""
    try:
        import resvg_py
    except ImportError as error:
        raise ConfigError(
            "a PNG needs the package resvg-py, which is not installed: pip install 'slipstream[png]'. "
            "An SVG (--svg FILE) needs nothing."
        ) from error
    known = [str(path) for name in folders if (path := Path(name).expanduser()).is_dir()]
    if not any(next(Path(folder).rglob(kind), None) for folder in known for kind in ("*.ttf", "*.otf", "*.ttc")):
        raise SetupError(
            f"a PNG would have no letters: there is no font in {', '.join(folders)}. "
            "Install one (Debian: fonts-dejavu-core) or take the SVG (--svg FILE)."
        )
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=SCALE, font_dirs=known, skip_system_fonts=True,
                                       sans_serif_family="DejaVu Sans"))  # fmt: skip
