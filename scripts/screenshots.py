"""Makes the pictures of the dashboard in docs/images from a real cluster under load: one prefill, one decode worker.

    python scripts/screenshots.py [--model smollm2] [--seconds 90] [--folder docs/images]

Needs Chromium (Debian: chromium) and a font (Debian: fonts-inter). The load is a few conversations at a time with
prompts of different lengths and shared beginnings, so that every part of the page has something to show. Pictures get
a palette of 256 colours, which keeps them small.
"""

from __future__ import annotations

import argparse
import base64
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np

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


PIXELS = """(async () => {
  const bytes = Uint8Array.from(atob("%s"), (c) => c.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const paper = new OffscreenCanvas(image.width, image.height).getContext("2d");
  paper.drawImage(image, 0, 0);
  const data = paper.getImageData(0, 0, image.width, image.height).data;
  let text = "";
  for (let at = 0; at < data.length; at += 32768) text += String.fromCharCode(...data.subarray(at, at + 32768));
  return [image.width, image.height, btoa(text)]; })()"""


def indexed(png: bytes, tab: Page) -> bytes:
    """The same picture with a palette of 256 of its colours, the most frequent and the most unlike; `tab` decodes."""
    width, height, packed = tab.run(PIXELS % base64.b64encode(png).decode())
    pixels = np.frombuffer(base64.b64decode(packed), np.uint8).reshape(-1, 4)[:, :3].astype(np.int64)
    keys, where, counts = np.unique(pixels @ [65536, 256, 1], return_inverse=True, return_counts=True)
    colours = np.stack([keys >> 16, keys >> 8 & 255, keys & 255], axis=1)
    palette = colours[np.argsort(-counts)[:128]]
    distance = np.full(len(colours), np.iinfo(np.int64).max)
    for colour in palette:
        distance = np.minimum(distance, ((colours - colour) ** 2).sum(axis=1))
    for _ in range(128):  # hues that are rare but unlike all others
        palette = np.vstack([palette, colours[distance.argmax()]])
        distance = np.minimum(distance, ((colours - palette[-1]) ** 2).sum(axis=1))
    nearest = np.concatenate(
        [((part[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1) for part in np.array_split(colours, 64)]
    )
    rows = np.zeros((height, width + 1), np.uint8)  # the first byte of a row: no filter
    rows[:, 1:] = nearest[where].reshape(height, width)
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 3, 0, 0, 0))
    chunks = [(b"IHDR", header), (b"PLTE", palette.astype(np.uint8).tobytes())]
    chunks += [(b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    return png[:8] + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big") for kind, data in chunks
    )


def save(page: Page, tab: Page, path: Path, *, whole: bool = True) -> None:
    time.sleep(1.2)
    data = indexed(page.picture(whole=whole), tab)
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
            page, tab = chromium.page(1280, 900), chromium.page()
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
            save(page, tab, options.folder / "dashboard-light.png")
            page.prefer(prefers_color_scheme="dark")
            save(page, tab, options.folder / "dashboard-dark.png")
            page.prefer(prefers_color_scheme="light")
            page.press("Escape")
            page.size(360, 1500, scale=1.5, mobile=True)
            save(page, tab, options.folder / "dashboard-phone.png", whole=False)
        stop.set()


if __name__ == "__main__":
    main()
