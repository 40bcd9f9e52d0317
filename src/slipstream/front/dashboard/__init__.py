"""The dashboard at `/dashboard`: what the cluster does, live, in a browser.

    static/      the page: HTML, CSS and ES modules, served as they are; it asks for a snapshot each second
    figures.py   numbers out of the text that `/metrics` gives, each with the name of its metric
    watch.py     looks: keeps the last snapshots, and percentiles of the last minutes
    snapshot.py  one snapshot as JSON
    checks.py    the machine's drawing and doctor's findings, made outside the event loop
    handlers.py  the paths

While nobody looks it costs one reading of the front's own histograms every two seconds.
"""

from slipstream.front.dashboard.handlers import Dashboard

__all__ = ["Dashboard"]
