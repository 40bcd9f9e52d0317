"""Makes the pictures of the dashboard in docs/images from a real cluster under load: one prefill, one decode worker.

    python scripts/screenshots.py [--model smollm2] [--seconds 90] [--folder docs/images]

Needs Chromium (Debian: chromium) and a font (Debian: fonts-inter). The load is a few conversations at a time with
prompts of different lengths and shared beginnings, so that every part of the page has something to show. Pictures are
compressed again before they are written.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.chromium import Page, browser, installed  # noqa: E402
from tests.proc.programs import Server, serving  # noqa: E402

TOPICS = ("the sea", "bread", "old bridges", "maps", "the night sky", "paper", "rivers", "clocks")
SYSTEM = "You are a patient teacher. Explain in plain words, with one example from daily life, and keep it short. "


def load(server: Server, stop: threading.Event, number: int) -> None:
    """One client after another, until it is told to stop."""
    turn = 0
    while not stop.is_set():
        turn += 1
        topic = TOPICS[(number * 3 + turn) % len(TOPICS)]
        words = SYSTEM * (1 + (number + turn) % 3) + f"Tell me about {topic}. " * (1 + turn * 5 % 9)
        body = {
            "model": "smollm2",
            "prompt": words,
            "max_tokens": 16 + (number * 13 + turn * 7) % 40,
            "temperature": 0.7,
        }
        server.post("/v1/completions", body, timeout_s=300)


def crc(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def smaller(png: bytes) -> bytes:
    """The same picture with its pixels deflated as well as zlib can, and without the browser's own chunks."""
    at, parts, pixels = 8, [], b""
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        data = png[at + 8 : at + 8 + size]
        if kind == b"IDAT":
            pixels += data
        elif kind in (b"IHDR", b"PLTE", b"tRNS"):
            parts.append(crc(kind, data))
        at += 12 + size
    packed = zlib.compress(zlib.decompress(pixels), 9)
    return png[:8] + b"".join(parts) + crc(b"IDAT", min(packed, pixels, key=len)) + crc(b"IEND", b"")


def save(page: Page, path: Path, *, whole: bool = True) -> None:
    time.sleep(1.2)
    data = smaller(page.picture(whole=whole))
    path.write_bytes(data)
    print(f"{path}: {len(data) / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the pictures of the dashboard in docs/images.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=90.0, help="of load before the pictures")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    if installed() is None:
        sys.exit("there is no Chromium here; install one (Debian: apt-get install chromium fonts-inter)")
    options.folder.mkdir(parents=True, exist_ok=True)
    with serving(model=options.model) as (_, server, _):
        stop = threading.Event()
        clients = [threading.Thread(target=load, args=(server, stop, number), daemon=True) for number in range(4)]
        for client in clients:
            client.start()
        with browser() as chromium:
            page = chromium.page(1280, 900)
            page.open(server.url + "/dashboard")
            page.until("document.querySelector('#status')?.dataset.state === 'ready'")
            time.sleep(options.seconds)
            finished = (
                "[...document.querySelectorAll('#requests-rows tr')].find((r) => !r.innerText.includes('running'))"
            )
            page.until(finished, 60)
            page.run(f"{finished}.click()")
            page.until("document.querySelector('#timeline .gantt')")
            page.prefer(prefers_color_scheme="light")
            save(page, options.folder / "dashboard-light.png")
            page.prefer(prefers_color_scheme="dark")
            save(page, options.folder / "dashboard-dark.png")
            page.prefer(prefers_color_scheme="light")
            page.press("Escape")
            page.size(360, 1500, scale=1.5, mobile=True)
            save(page, options.folder / "dashboard-phone.png", whole=False)
        stop.set()


if __name__ == "__main__":
    main()
