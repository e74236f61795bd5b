"""Colors of the page: each text can be read on each ground on which it stands, in light and in dark."""

import re
from pathlib import Path

import pytest

CSS = (Path(__file__).parents[2] / "view_src" / "src" / "css" / "base.css").read_text()
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", re.search(rf"{selector} \{{(.*?)\n\}}", CSS, re.DOTALL)[1]))
    for selector in (r":root", r':root\[data-theme="dark"\]')
)
BY_PREFERENCE = re.search(r"prefers-color-scheme: dark\) \{(.*?)\n\}", CSS, re.DOTALL)[1]
GROUNDS = ("page", "panel", "sunk")
PAIRS = [
    *((text, ground) for text in ("text", "dim", "link", "pos", "neg") for ground in GROUNDS),
    *(("text", ground) for ground in ("prompt", "feedback", "close", "pos1", "pos2", "neg1", "neg2", "v1", "v2", "v3")),
    *(("dim", ground) for ground in ("prompt", "feedback", "close", "p1", "pos1", "neg1", "v1")),
    *((f"{name}-text", name) for name in ("pass", "part", "fail", "none", "error", "missing")),
    *((f"{name}-text", name) for name in ("p1", "p2", "p3", "p4", "pos3", "neg3", "v4")),
    ("flag", "flag-ground"), ("flag", "panel"),
]  # fmt: skip


def luminance(color):
    channels = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_the_contrast_of_4_5_on_each_of_its_grounds(theme):
    short = {}
    for text, ground in PAIRS:
        dim, bright = sorted((luminance(theme[text]), luminance(theme[ground])))
        contrast = (bright + 0.05) / (dim + 0.05)
        if contrast < 4.5:
            short[text, ground] = round(contrast, 2)
    assert not short


def test_dark_by_the_system_is_dark_by_choice():
    assert dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", BY_PREFERENCE)) == DARK
