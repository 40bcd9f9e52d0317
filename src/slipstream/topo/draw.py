"""Draws a machine: in the terminal with rich, as SVG for reports and the dashboard, and from that as PNG.

All show the same arrangement: one box a NUMA node, in it the switches with the GPUs and NICs that hang on them, the
NVLink fabric above, and below the route of the handoff. Colour never says anything that the words do not say too.
"""

from __future__ import annotations

from slipstream.topo.draw_arrange import arrange
from slipstream.topo.draw_png import png
from slipstream.topo.draw_svg import Handoff, Overlay, Placed, svg
from slipstream.topo.draw_terminal import terminal

__all__ = ["Handoff", "Overlay", "Placed", "arrange", "png", "svg", "terminal"]
