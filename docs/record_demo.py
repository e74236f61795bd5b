"""Record `make demo` as docs/assets/demo.svg: `python docs/record_demo.py` runs its command in a terminal.

The SVG names only fonts that are installed where it is read.
"""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
COMMAND = "agentenv run --env math_retry --n 2 --max_tokens 160 --progress plain"
WIDTH = 124
THEME = TerminalTheme(
    (13, 17, 23), (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207),
     (177, 186, 196)],
)  # fmt: skip
CODE_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
    <style>
    .{unique_id}-matrix {{
        font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
        font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
    }}
    .{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
    {styles}
    </style>
    <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
    </defs>
    {chrome}
    <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix">
    {matrix}
    </g>
    </g>
</svg>
"""


def terminal_output(command: str, folder: str) -> str:
    """Return what a command prints to a terminal of WIDTH columns."""
    leader, follower = pty.openpty()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    running = subprocess.Popen(command, shell=True, cwd=folder, env=env, stdout=follower, stderr=follower)
    os.close(follower)
    chunks: list[bytes] = []
    while running.poll() is None or select.select([leader], [], [], 0)[0]:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                chunks.append(os.read(leader, 65536))
            except OSError:
                break
    os.close(leader)
    if running.wait():
        raise SystemExit(b"".join(chunks).decode())
    return b"".join(chunks).decode().replace("\r\n", "\n")


def shortened(output: str) -> str:
    """Return the output without its progress lines but the last, and with a stable name of the run directory."""
    lines = re.sub(r"math_retry-tiny-math-[\w-]+", "demo", output).splitlines()
    progress = [i for i, line in enumerate(lines) if re.search(r"episodes · reward|elapsed", line)]
    return "\n".join(line for i, line in enumerate(lines) if i not in progress[:-1])


def main() -> None:
    """Run the command and write the SVG."""
    with tempfile.TemporaryDirectory() as folder:
        output = shortened(terminal_output(COMMAND, folder))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (COMMAND.removesuffix(" --progress plain"), "bold")))
    console.print(Text.from_ansi(output))
    svg = console.export_svg(title="make demo", theme=THEME, code_format=CODE_FORMAT, unique_id="demo")
    (ROOT / "docs" / "assets" / "demo.svg").write_text(svg, encoding="utf-8")
    if "http" in re.sub(r'xmlns="[^"]*"', "", svg):
        raise SystemExit("expected an SVG that loads nothing from elsewhere")


if __name__ == "__main__":
    main()
