"""What MathGrader says about answers: outcomes, math-verify's known traps, hostile answers, GSM8K."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import DataError
from agentenv.rewards.rules.math.reward import MathGrader, default_grader, math_outcome
from agentenv.rewards.types import RewardResult, Status

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k_test.jsonl"
CORRECT, WRONG, PARSE_ERROR = "correct", "wrong", "parse_error"


@pytest.fixture(scope="module")
def shared():
    """One grader for all tests of the module, though each test has its own event loop."""
    grader = MathGrader()
    yield grader
    grader.close_now()


async def graded(grader: MathGrader, answer: str, label: object) -> RewardResult:
    return await grader.grade(f"\\boxed{{{answer}}}", label)


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "label", "outcome"),
    [
        ("5", 5, CORRECT),
        ("6", 5, WRONG),
        (r"\frac{2}{4}", "0.5", CORRECT),
        (r"\sqrt{324}", 18, CORRECT),
        ("3**2", 9, CORRECT),
        ("x = 5", 5, CORRECT),
        ("x_1=5", 5, CORRECT),
        ("5", "x=5", CORRECT),
        (r"\arcsin(0)", 0, CORRECT),
        ("2+3=5", 5, CORRECT),
        (r"\{2, 1\}", r"\{1, 2\}", CORRECT),
        ("(2, 1)", "(1, 2)", WRONG),
        (r"\log_2 8", 3, CORRECT),
        ("(x+1)^2", "x^2+2x+1", CORRECT),
        ("(x+1)^2", "x^2+2x+2", WRONG),
        (r"3\pi", "3π", CORRECT),
        (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}", CORRECT),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", CORRECT),
        ("4 or 3", "3 or 4", CORRECT),
        (r"\text{Monday}", "Monday", CORRECT),
        ("Tuesday", "Monday", WRONG),
        ("(B)", "B", CORRECT),
        # percentages: number to number with a sign on either side, or by value
        (r"50\%", 50, CORRECT),
        ("50", "50%", CORRECT),
        (r"50\%", 0.5, CORRECT),
        (r"\frac{1}{2}", "50%", CORRECT),
        ("0.5", 50, WRONG),
        # rounding
        ("0.333333", "1/3", CORRECT),
        ("0.333", "1/3", WRONG),
        ("1/3", "0.333", CORRECT),
    ],
)
async def test_grades_answers(shared, answer, label, outcome):
    assert math_outcome(await graded(shared, answer, label)) == outcome


@pytest.mark.parametrize(
    ("answer", "label", "outcome"),
    [
        (r"1/2006!", r"1/2004!", WRONG),
        (r"10^{-10}+10^{-20}", r"3 \cdot 10^{-10}", WRONG),
        (r"4\sqrt(2)", "4", WRONG),
        (r"4\sqrt(2)", r"4\sqrt{2}", CORRECT),
        ("3*x-1*y+13=0", "3x+4y+14=0", WRONG),
        ("1.414214", r"\sqrt{2}", WRONG),
        (r"\sqrt{2}", "1.414214", CORRECT),
        ("dayMon", "Monday", WRONG),
        ("0.0000001", "0", WRONG),
        (r"\frac{0}{0}", "0", WRONG),
        # one of these numbers is the gold, or their sum, product or concatenation is
        ("1 2 3 4 5", 5, PARSE_ERROR),
        ("5 6", 11, PARSE_ERROR),
        ("3 or 4", 3, WRONG),
        ("5, 6", 5, WRONG),
        (r"5 \text{ and } 6", 5, WRONG),
        (r"5 \_ 6", 5, PARSE_ERROR),
        (r"5 \approx 6", 5, PARSE_ERROR),
        (r"5 \neq 6", 6, PARSE_ERROR),
        ("5 # 6", 5, PARSE_ERROR),
        ("not 5", 5, WRONG),
        ("I do not know", 5, PARSE_ERROR),
        ("5 = 6 = x", 5, WRONG),
        ("你好", 5, PARSE_ERROR),
        ("5^", 5, PARSE_ERROR),
        (r"\frac{1}{", "1", PARSE_ERROR),
    ],
)
async def test_known_traps(shared, answer, label, outcome):
    text = f"#### {answer}"  # not a box, so that braces need not balance
    grade = await shared.grade(text, label)
    assert math_outcome(grade) == outcome, grade


CLAIMS = [  # what an equation says: a false one is never right, and a true one of numbers has a value
    (r"\log_{3}(27)=3", {"3": True, r"3=\log_3(27)": True, r"\log_3 27=3": True, "1+2=3": True}),
    (r"\log_{3}(27)=3", dict.fromkeys(["1=2", "7=9", r"\log_3(27)=4", "x+1=x", "27=3^3", "1=1"], False)),
    ("2+2=4", {"4": True, "5": False, "2+2=5": False, "1=1": False}),
    (r"\sqrt{16}=4", {"4": True, "1=1": False, "x=x": False}),
    ("N=n", {"1=1": False, "n=N": True}),
    ("x^2+1=0", {"1=1": False, "y^2+1=0": False, "x^4+2x^2+1=0": False, "2x^2+2=0": True, "x^2=-1": True}),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}=-2", {"-2": True, "1=1": False}),
    (r"\mathbf y=c_1e^t\begin{pmatrix}1\\2\end{pmatrix}", {"1=1": False}),
    (r"\sin^2 x+\cos^2 x=1", {"1=1": False, "x=x": False}),
    ("2<3", {"4<5": False}),
    ("a^2+1=0, b=2", {"1=1, b=2": False, "c^2+1=0, b=2": False, "b=2, a^2+1=0": True}),
    ("7", {"3+4=7": True, "8=7": False, "x=3+4=7": True, "x=3+5=7": False, "7=8=7": False, r"\frac{14}{2}=7": True}),
    ("6", {"5 = 6": False, "x=5=6": False, "2+3=6": False, "1.5 = 6": False, "x+y=6": True}),
    ("5.67", {r"\frac{17}{3}=5.67": True, r"\frac{17}{3}=5.6667=5.67": True}),
    (r"\frac23", {r"0.66=\frac23": True, r"0.6=\frac23": True, r"0.5=\frac23": False}),
    ("0.3", {r"\frac13=0.3": True, r"\frac12=0.3": False}),
    ("100.9", {"100=100.9": False, "100.85=100.9": True}),
    ("5.6", {r"\frac{567}{100}=5.60": False, r"\frac{567}{100}=5.6": True, r"x=\frac{567}{100}=5.60": False}),
    ("0.55", {"0.5=0.55": False, r"0.5\cdot 1=0.55": False}),
    (r"\frac{\pi}{3}", {r"60^\circ=\frac{\pi}{3}": True, r"30^\circ=\frac{\pi}{3}": False}),
    (r"\frac{\pi}{3}", {r"60°=\frac{\pi}{3}": True, r"60^°=\frac{\pi}{3}": True, r"30°=\frac{\pi}{3}": False}),
    (
        r"30^\circ",
        {
            r"\arcsin(1/2)=30^\circ": True,
            r"\frac{\pi}{6}=30^\circ": True,
            r"\frac{\pi}{3}=30^\circ": False,
            r"\arcsin(1)=30^\circ": False,
            "29=30^\\circ": False,
            r"\angle A=30°": True,
        },
    ),
    (r"\frac12", {r"\sin 30=\frac12": True, r"\sin(30)=\frac12": True, r"\cos 30=\frac12": False}),
    ("45", {r"\theta=\arctan(1)=45^\circ": True, r"\theta=\arctan(2)=45^\circ": False}),
    (r"45^\circ", {r"\theta=\arctan(1)=45^\circ": True}),
    ("0.5", {r"\cos 60=0.5": True, r"\cos 60^\circ=0.5": True, r"\sin 60=0.5": False, r"x=\sin 60=0.5": False}),
    ("2", {r"\sin 2\pi=2": False, r"2\sin^2(90)=2": True}),
    ("5", {r"0\cdot x=5": False, "x-x=5": False, r"\frac{x}{x}=5": False, "x^0=5": False, "y+x-x=5": True}),
    ("5", {r"\frac{dy}{dx}=5": True, "f(x)=5": True, "x^2=5": True}),
    ("x=3", {"2x+1=7": False, "2x=6": False, "3=x": True, "x=3": True}),
    ("x<1", {"-x>-1": True, "2x<2": False, "x > 1": False}),
    (r"(-\infty,1)", {"-x>-1": True, "2x<2": False}),
    ("(-1,1)", {"x^2<1": False, "-1<x<1": True, "-2<2x<2": False}),
    ("-1<x<1", {"x^2<1": False, "(-1,1)": True}),
    ("2x, 3x", {"y=2x, y=3x": True}),
]
INVISIBLE = [
    ("42", {r"\phantom{42}": False, r"4\phantom{0}2": False, r"\hphantom{42}": False, r"\phantom{\frac{4}{2}}": False}),
    (
        "42",
        {r"\phantom{\frac{\sqrt{\frac{1}{2}}}{42}}": False, r"\phantom{1}42": True, r"\vphantom{\frac{1}{2}}42": True},
    ),
]
SPELLINGS = [
    (r"11,\! 111,\! 111,\! 100", {"11111111100": True, "11,111,111,100": True, r"11,\!111,\!111,\!100": True}),
    ("11111111100", {r"11,\! 111,\! 111,\! 100": True, r"11,\! 111,\! 111,\! 101": False}),
    ("1,2,3", {r"1,\! 2,\! 3": True, "１，２，３": True}),
    (
        r"d=\frac{\sqrt{37}}{2}, M=\left(\frac56, \frac74\right)",
        {
            r"d=\dfrac{\sqrt{37}}{2}, M=\left(\dfrac56, \dfrac74\right)": True,
            r"d = \frac{\sqrt{37}}{2},M=(\frac{5}{6},\frac{7}{4})": True,
        },
    ),
    (r"A\rightarrow\frac12", {r"A\rightarrow\dfrac{1}{2}": True}),
    (
        r"\frac{5\pm\sqrt{241}}{12}",
        {
            r"\dfrac{5\pm\sqrt{241}}{12}": True,
            r"\frac{5+\sqrt{241}}{12}, \frac{5-\sqrt{241}}{12}": True,
            r"x=\frac{5±\sqrt{241}}{12}": True,
            r"x=\frac{5+\sqrt{241}}{12} \text{ or } x=\frac{5-\sqrt{241}}{12}": True,
            r"\frac{5-\sqrt{241}}{12}, \frac{5-\sqrt{241}}{12}": False,
            r"\frac{5+\sqrt{241}}{12}": False,
            r"\frac{5\pm\sqrt{242}}{12}": False,
        },
    ),
    (
        r"1+\sqrt2, 1-\sqrt2",
        {r"1\pm\sqrt{2}": True, r"\{1\pm\sqrt2\}": True, r"1\mp\sqrt2": True, r"1\pm\sqrt3": False},
    ),
    (
        "(-∞, -3) ∪ (3, +∞)",
        {r"(-\infty,-3)\cup(3,\infty)": True, r"(-\infty,-3)\cup(4,\infty)": False, "(-∞,-3)∪(3,∞)": True},
    ),
    (r"\{x|-1 < x < 1\}", {"(-1,1)": True, r"-1<x<1": True, r"\{x \mid -1 < x < 1\}": True, "(-1,2)": False}),
    (r"\{x \in \mathbb{R} : x \geq 2\}", {r"[2,\infty)": True, "x ≥ 2": True, r"(2,\infty)": False}),
    (r"\frac{1+a}c", {r"\frac{1+a}{c}": True, "(1+a)/c": True, r"\frac{1+b}{c}": False}),
    (r"\frac\pi6", {r"\frac{\pi}{6}": True, r"\pi/6": True, r"\frac\pi3": False}),
    (r"m_{\max }=n^2-n-1", {r"m_{\max}=n^2-n-1": True, "n^2-n-1": True, "n^2-n+1": False}),
    ("-3./2", {"-1.5": True, "-3/2": True, "3/2": False}),
    ("a ≠ 2", {r"a \neq 2": True, r"a\ne2": True, r"a \neq 3": False}),
    ("12", {r"12^{\mathrm{th}}": True, "12^{th}": True, r"12^\text{th}": True, r"12^{2}": False}),
    ("10^{-9}", {"1e-9": True, "0.000000001": True, "1e-8": False, "0": False}),
    ("10^{-3}", {"1/1000": True, "1/1001": False}),
    (r"\sqrt2", {"2^{0.5}": True, "2^{0.6}": False, "2^{1/2}": True}),
    ("i", {r"\sqrt{-1}": True, r"-\sqrt{-1}": False}),
    ("1<x<2", {"2>x>1": True, "3>x>1": False, r"2\ge x\ge1": False}),
    ("42", {"４２": True, "４１＋１": False, "４２．０": True, "４３": False}),
    ("3,4", {r"3 \lor 4": True, r"x=3 \text{ or } x=4": True, "x=3 or 4": True, "3 or 5": False}),
    (r"\frac12", {r"\sin 30^\circ": True, r"\sin(30°)": True, r"\cos 30^\circ": False, r"\sin 30": False}),
    # A task that converts an angle must not be right with the angle that it gave.
    ("30^\\circ", {r"\frac{\pi}{6}": False, "30": True, "30 degrees": True}),
]
UNITS = [
    ("2", {**dict.fromkeys(["2m", "2s", "2h", "2g", "2L", "5x"], False), "2 m": True, r"2\text{m}": True, "2cm": True}),
    (r"2\pi", {r"2\pi h": False, r"2\pi \text{ m}": True, r"2\pi\text{ dollars}": True}),
    (r"5\sqrt{2}", {r"5\sqrt{2}\text{ m}": True, r"5\sqrt{2}\,\mathrm{m}^2": True, r"5\sqrt{2} m": False}),
    ("x+c", {"x+c": True, "x": False, "x+s": False}),
    (
        "5",
        {
            **dict.fromkeys([f"5 {word}" for word in ("squared", "cubed", "factorial", "root 2", "choose 2")], False),
            **dict.fromkeys(
                [f"5 {word}" for word in ("halves", "thirds", "tenths", "hundredths", "billionths")], False
            ),
            **dict.fromkeys([f"5 {word}" for word in ("at most", "at least", "doubled", "degrees below zero")], False),
            **dict.fromkeys(["5 hundred", "5 millions", "5 hundred dollars"], False),
            **dict.fromkeys(["5 meters squared", "5 square roots", "5 more apples", "5 seconds", "5 quarters"], True),
            **dict.fromkeys(["5 days at work", "5 dozen", "5 hundred-dollar bills", "5 third graders"], True),
        },
    ),
    ("500", {"5 hundred": True, "5 hundred dollars": True, r"\$5 \text{ hundred}": True}),
    ("2000000", {"2 millions": True}),
    (r"\text{3:30 p.m.}", {"3:30 PM": True, r"3:30\,\text{pm}": True, "3:30 p. m.": True, "3:30 a.m.": False}),
    (
        r"\frac{3}{56}",
        {
            **dict.fromkeys([r"\frac{3}{56} \approx 0.0536", r"x = \frac{3}{56} ≈ 0.054"], True),
            **dict.fromkeys(
                [r"\frac{3}{56} \approx 0.07", r"\frac{3}{57} \approx 0.0536", r"0.05 \approx 0.0536"], False
            ),
        },
    ),
    (r"2\sqrt{3}", {r"2\sqrt{3} \approx 3.46": True, r"2\sqrt{3} \approx 3.64": False, r"\sqrt{3}\approx 1.73": False}),
    ("5", {r"5 \approx 5.2": False, r"5\approx 5.0": True, r"x=5 \approx 6.0": False, r"2+3 \approx 5.0": False}),
]
BRACKETS = [
    ("(1,3)", {"{1,3}": True, "{3,1}": False}),
    ("(1,2),(3,4)", {"(3,4),(1,2),(3,4)": True, "(3,4)": False, "(1,2),(1,2)": False}),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", {r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]": True}),
    (r"\left[\begin{matrix}1\\2\end{matrix}\right]", {r"\begin{pmatrix}1\\2\end{pmatrix}": True}),
    (r"x \leq 2", {"x <= 2": True, "x >= 2": False, r"2 \gt x": False}),
    (r"\boxed{2}, \boxed{3}", {"3, 2": True, "3": False}),
    ("(1,2)", {r"\{1,2\}": False, r"\{2,1\}": False, "(2,1)": False, "1,2": True, "2,1": False, "[1,2]": False}),
    (r"\{1,2\}", {"(1,2)": False, "1,2": True, "2,1": True, r"\{2,1\}": True, r"\{1,2,2\}": True, "1,2,2": False}),
    ("1,2", {"1,2,2": False, r"\{2,1\}": True, "(2,1)": False, "(1,2)": True, "2,1": True}),
    ("1,2,2", {"1,2": False, r"\{1,2\}": False, "2,1,2": True}),
    ("4,10,-2", {"10,4,-2": True, "(4,10,-2)": True, "(10,4,-2)": False}),
    ("(1,2),(3,4)", {r"\{(3,4),(1,2)\}": True, "(2,1),(3,4)": False}),
    ("a=2, b=3", {"2,3": True, "2 and 3": True, "3,2": False, "b=3, a=2": True, "(2,3)": True, "(3,2)": False}),
    (r"x=2 \text{ or } x=3", {"3,2": True, "2,3": True}),
    (
        r"(-\infty,-1]\cup[1,\infty)",
        {
            **dict.fromkeys([r"x \le -1 \text{ or } x \ge 1", r"x\ge1 \text{ or } x\le-1"], True),
            **dict.fromkeys(
                [r"x \le -1 \text{ and } x \ge 1", r"x<-1 \text{ or } x\ge 1", r"x\le 1 \text{ or } x\ge -1"], False
            ),
            **dict.fromkeys([r"x\le-1 \text{ or } y\ge1", r"x^2\ge1", r"x\le-1", r"x\le-1 \text{ or } 2x\ge2"], False),
        },
    ),
    (r"\lg 2", {r"\log_{10}2": True, r"\log 2": True, r"\lg 3": False, r"\ln 2": False}),
]
TINY = [  # nothing is zero because it is small
    (
        r"\frac{2^{100}-1}{2^{100}}",
        {r"1-2^{-100}": True, "10^{-30}": False, "1": False, "0": False, r"1-\frac{1}{2^{101}}": False, "1.0": True},
    ),
    (r"\frac{2^{1000}-1}{2^{1000}}", {r"1-\frac{1}{2^{1000}}": True, r"1-\frac{1}{2^{1001}}": False}),
    (r"\frac{99!-1}{99!}", {"10^{-30}": False, "1": False}),
    (r"\frac{1}{100!}", {r"\frac{1}{100\cdot 99!}": True, r"\frac{1}{101!}": False}),
    ("x=10^{-20}", {r"x=\frac{1}{10^{20}}": True, "x=10^{-30}": False, "x=0": False}),
    ("x>10^{-20}", {"x>10^{-30}": False}),
    ("x^2=10^{-20}", {"x^2=10^{-30}": False}),
    ("10^{-12}x = 1", {r"\frac{x}{10^{12}}=1": True, "10^{-13}x=1": False}),
    ("(0,10^{-20})", {"(0,10^{-30})": False}),
    (r"\{1,2^{-80}\}", {r"\frac{1}{2^{80}}, 1": True, r"\{1,10^{-30}\}": False}),
    (r"\{1,0.0000001\}", {r"\{1,0.0000002\}": False, r"\{1,0\}": False, r"\{1,0.00000010\}": True}),
    (r"\sqrt{3+2\sqrt{2}}", {r"1+\sqrt{2}": True, r"1+\sqrt{2}+10^{-40}": False}),
    (r"x\sqrt{3+2\sqrt{2}}", {r"(1+\sqrt{2})x": True, r"(1+\sqrt{2})x+10^{-30}": False}),
    ("0.3x", {"0.1x+0.2x": True, "0.3x+10^{-30}": False}),
    ("5", {"5 = 5+10^{-20}": False, "x+10^{-12}=x": False}),
]
BASES = [  # the base is part of a number, however it is written
    (
        "2516_8",
        {
            **dict.fromkeys(["2516_{8}", "(2516)_8", r"2516_{\text{eight}}", r"2516_\text{eight}", "2516_{(8)}"], True),
            **dict.fromkeys([r"\mathrm{2516}_{8}", r"\left(2516\right)_{8}", "2516 base 8", "x=2516_{ 8 }"], True),
            **dict.fromkeys(["2516", "1358", "1358_{10}", "2516_9", "2515_8", "2516_b", "1357=2516_8"], False),
            **{"1358=2516_8": True, "02516_8": True, "2516₈": True},
        },
    ),
    ("1358", {"1358_{10}": True, "2516_8": False}),
    ("(1011)_2", {r"1011_{\text{two}}": True, "1{,}011_2": True, "1011": False, "1011_3": False}),
    ("1AF_{16}", {"1af_{16}": True, "(1AF)_{16}": True, r"1AF_{\text{hex}}": True, "1AF": False, "431": False}),
    (r"\text{ABC}_{16}", {"ABC_{16}": True, "abc_{16}": True, "ABC": False}),
    ("-0.1_2", {"-0.1_{2}": True, "-0.1": False}),
    ("12_{3}, 201_{3}", {"201_3, 12_3": True, "201, 12": False}),
    ("121_b", {"121_{b}": True, "121": False}),
    ("5", {r"5_{\text{max}}": False, "5_6": False}),
    ("9", {"3^{2}_{5}": False}),
    ("251600", {"2516_1000": False}),
    (r"x_1\cdot 3", {"3x_1": True, "3x_2": False}),
    ("x_1^2+x_2^2", {"x^2_1+x^2_2": True}),
    (
        r"\ln 2",
        {
            **dict.fromkeys(
                [r"\log_e 2", r"\log_{e}2", r"\log_e(2)", r"\log_{\mathrm{e}} 2", "log_e 2", "ln(2)"], True
            ),
            **dict.fromkeys([r"\log 2", r"\log_e 3", r"\log_2 e"], False),
        },
    ),
    (r"\log_e x", {r"\ln x": True, r"\log x": False}),
]
LEFT_TO_DO = [  # the task's own expression is no answer
    (
        "56088",
        {**dict.fromkeys([r"123\cdot456", "123×456", "123*456", r"x=123\cdot 456"], False), r"123\cdot456=56088": True},
    ),
    ("18", dict.fromkeys(["9 + 9", r"2 \times 9", "2·9", "2(9)", "(3+6)(2)", "20-2"], False)),
    ("400", {r"17\cdot 24-8": False, r"20^2": True, r"20\cdot20=400": True, r"20\cdot20=40\cdot10": False}),
    (r"\frac13", {r"\int_0^1x^2dx": False, "∫_0^1 x^2 dx": False, r"\int_0^1x^2dx=\frac13": True}),
    ("5050", {r"\sum_{k=1}^{100} k": False, r"1+2+\cdots+100": False}),
    ("1", {r"\lim_{x\to0}\frac{\sin x}{x}": False, r"\sin^2x+\cos^2x": False, r"\cos(2\pi)": True, "0.5+0.5": False}),
    ("-2", {r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}": False, r"\begin{vmatrix}1&2\\3&4\end{vmatrix}": False}),
    ("12", {r"\text{lcm}(4,6)": False, r"\frac{48\cdot2}{8}": False, r"\frac{24}{2}": True, r"2\sqrt{36}": False}),
    ("6", {r"\gcd(12,18)": False, r"\max(3,6)": False, r"20 \bmod 7": False, "3!": True, r"42\div 7": False}),
    ("5", {r"\sqrt{9+16}": False, r"\sqrt{25}": True, "|3-8|": False, r"\frac{5x}{x}": False, "5 min": True}),
    ("90", {r"\frac{10!}{8!}": True, r"\binom{10}{2}\cdot 2": False}),
    ("1.5e10", {r"1.5\times 10^{10}": True, r"15\cdot 10^{9}": True}),
    ("3x^2", {r"\frac{d}{dx}x^3": False, r"\frac{dy}{dx}=3x^2": True}),
    (r"\frac{\pi}{4}", {r"\int_0^1 \frac{1}{1+x^2}dx": False, r"\frac{1}{4}\pi": True}),
    (r"\sum_{k=1}^n k", {r"\sum_{k=1}^{n} k": True}),
    (r"12\pi", {r"4\pi\cdot 3": True}),
]


@pytest.mark.long
@pytest.mark.parametrize("table", [CLAIMS, INVISIBLE, SPELLINGS, UNITS, BRACKETS, TINY, BASES, LEFT_TO_DO])
async def test_answers_are_judged_by_what_they_say(shared, table):
    expected = {(answer, label): right for label, answers in table for answer, right in answers.items()}
    grades = {(answer, label): await graded(shared, answer, label) for answer, label in expected}
    assert {case: math_outcome(grade) == CORRECT for case, grade in grades.items()} == expected


@pytest.mark.parametrize(
    ("text", "label", "outcome"),
    [
        (r"\boxed{1},\boxed{2},\boxed{3}", "1,2,3", CORRECT),
        (r"$x=\boxed{3}$ or $x = \boxed{1}$, and $x=\boxed{2}$.", r"\{1,2,3\}", CORRECT),
        (r"$x_1=\boxed{2}, \quad x_2=\boxed{-2}$", r"\pm 2", CORRECT),
        (r"So \boxed{5}. Hence \boxed{1} and \boxed{2}", "1,2", CORRECT),
        (r"\boxed{1} \text{ and } \boxed{\frac{4}{2}}", "2,1", CORRECT),
        (r"\boxed{5}. So it is \boxed{1,2}", "1,2", CORRECT),
        (r"\boxed{3}, \boxed{1}, \boxed{2}", "1,2", WRONG),
        (r"\boxed{1}, \boxed{2}, \boxed{2}", "1,2", WRONG),
        (r"\boxed{1,5}, \boxed{1,2}", "1,2", CORRECT),
        (r"\boxed{1}, no wait, \boxed{2}", "1,2", WRONG),
        (r"<think>\boxed{1}, </think> \boxed{2}", "1,2", WRONG),
        (r"\boxed{\pm 2}, \boxed{\pm 2}", r"\pm 2", CORRECT),
        ("\\boxed{\\pm 2}\n\n\\boxed{\\pm 2}", "2, -2", CORRECT),
        (r"\boxed{\{1,2\}}, \boxed{\{1,2\}}", "1,2", CORRECT),
        (r"\boxed{\pm 2}, \boxed{\pm 3}", r"\pm 3", WRONG),
        (r"\boxed{2}, \boxed{2}", "2,2", CORRECT),
        (r"\boxed{2}, \boxed{2}", "2,-2", WRONG),
        (r"\boxed{1}, \boxed{2}", "2", CORRECT),
        (r"\boxed{1}, \boxed{2}", "1", WRONG),
        (r"\boxed{1}, \boxed{2}", ["1", "2"], CORRECT),
        (r"\boxed{1} or \boxed{2}", "2", WRONG),
        (r"\boxed{1} or \boxed{2}", "1,2", CORRECT),
        (r"$\boxed{\frac{1}{2}}$ or $\boxed{0.5}$", "0.5", CORRECT),
        (r"\boxed{2}, \boxed{1}", "(2,1)", WRONG),
        (r"\boxed{1}, " * 300 + r"\boxed{2}", "1,2", WRONG),
    ],
)
async def test_several_boxes_count_where_the_label_is_a_list(shared, text, label, outcome):
    assert math_outcome(await shared.grade(text, label)) == outcome


async def test_an_enumeration_without_a_box_is_not_an_answer(shared):
    assert math_outcome(await shared.grade("1 2 3 4 5 6 7", "7")) == "no_answer"


async def test_a_very_long_answer_is_not_graded(shared):
    grade = await graded(shared, "1+" * 4000 + "1", 4001)
    assert math_outcome(grade) == PARSE_ERROR
    assert "4096" in grade.detail


@pytest.mark.parametrize("label", [r"\frac{1}{", "5^", [r"\frac{1}{", 6]])
async def test_a_label_that_math_verify_cannot_read_is_the_datas_error(shared, label):
    with pytest.raises(
        DataError, match=r"^label: expected an answer that math-verify can read, got '.*'\. Correct the row\.$"
    ):
        await graded(shared, "5", label)
    with pytest.raises(DataError):
        await graded(shared, "I do not know", label)
    grades = await asyncio.gather(*(graded(shared, "5", label) for _ in range(3)), return_exceptions=True)
    assert {type(grade) for grade in grades} == {DataError}


async def test_an_unreadable_label_still_matches_itself_and_spares_the_other_golds(shared):
    assert math_outcome(await graded(shared, "6", [r"\frac{1}{", 6])) == CORRECT
    assert math_outcome(await graded(shared, r"\sqrt{36}", [r"\frac{1}{", 6])) == CORRECT
    assert math_outcome(await shared.grade(r"#### \frac{1}{", r"\frac{1}{")) == CORRECT


@pytest.mark.long
async def test_a_label_that_takes_too_long_is_the_datas_error_and_not_the_answers_timeout():
    async with MathGrader(num_workers=1, timeout_s=0.3) as grader:
        with pytest.raises(
            DataError, match=r"^label: expected an answer that can be compared in 0\.3 s of CPU time, got '.*'"
        ):
            await graded(grader, "5", "9^{9^{9^9}}")
        assert math_outcome(await graded(grader, r"\sqrt{36}", ["9^{9^{9^9}}", 6])) == CORRECT


@pytest.mark.parametrize("label", ["你好", "Monday", "e.g."])
async def test_a_label_of_words_compares_as_a_string(shared, label):
    assert math_outcome(await graded(shared, label, label)) == CORRECT
    assert math_outcome(await graded(shared, "5", label)) == WRONG


async def test_an_answer_that_cannot_be_compared_is_the_answers_fault(shared):
    grade = await graded(shared, "1<x<2<3", "1<x<2")
    assert math_outcome(grade) == PARSE_ERROR
    assert "compared" in grade.detail


async def test_a_bad_label_raises(shared):
    with pytest.raises(DataError):
        await shared.grade(r"\boxed{5}", None)


@pytest.mark.long
async def test_others_are_graded_while_hostile_answers_compute():
    async with MathGrader(num_workers=3, timeout_s=200.0) as grader:
        hostile = [asyncio.create_task(graded(grader, answer, 5)) for answer in ("9^{9^{9^9}}", "(10^9)!")]
        others = [math_outcome(await graded(grader, f"|{{-{number}}}|", number)) for number in range(1, 12)]
        assert others == [CORRECT] * 11
        assert not any(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)


HOSTILE = [
    "9^{9^{9^9}}",
    "(10^9)!",
    "9!" + "!" * 50,
    "2^{1000000000}",
    r"\sqrt{2^{100000001}}",
    r"\binom{1000000000}{500000000}",
    HOSTILE_SUM := r"\sum_{n=1}^{1000000000} n^2/(n+1)",
    HOSTILE_POWER := "(1+x)^{100000}",
    "{" * 2000 + "5" + "}" * 2000,
    "(" * 2000 + "5" + ")" * 2000,
    r"\sqrt{" * 400 + "5" + "}" * 400,
]


@pytest.mark.long
async def test_every_known_hostile_answer_times_out_by_its_computing():
    async with MathGrader(timeout_s=0.3) as grader:
        labels = {HOSTILE_SUM: r"\sum_{n=1}^{9} n", HOSTILE_POWER: "x+5"}  # a number would refuse them at once
        checks = (graded(grader, answer, labels.get(answer, 5)) for answer in HOSTILE)
        grades = await asyncio.wait_for(asyncio.gather(*checks), 300)
    assert {answer[:40]: math_outcome(grade) for answer, grade in zip(HOSTILE, grades, strict=True)} == dict.fromkeys(
        [answer[:40] for answer in HOSTILE], "timeout"
    )
    assert {grade.detail for grade in grades} == {"the check took more than 0.3 s of CPU time"}


@pytest.mark.long
async def test_equal_checks_at_the_same_time_are_done_once_and_remembered(monkeypatch):
    async with MathGrader() as grader:
        checks = []

        async def counted(answer, golds):
            checks.append(answer)
            return await MathGrader.check(grader, answer, golds)

        monkeypatch.setattr(grader, "check", counted)
        grades = await asyncio.gather(*(graded(grader, r"\sqrt{16}", 4) for _ in range(50)))
        assert {math_outcome(grade) for grade in grades} == {CORRECT}
        assert math_outcome(await graded(grader, r"\sqrt{16}", 4)) == CORRECT
        assert checks == [r"\sqrt{16}"]


async def test_only_the_newest_results_and_no_failures_are_remembered(monkeypatch):
    grader = MathGrader(cache_size=2)
    checks = []

    async def check(answer, golds):
        checks.append(answer)
        if answer == "i":
            return RewardResult.failed("the worker died")
        return RewardResult(0.0, score=0.0, status=Status.TIMEOUT if answer == "t" else Status.OK, extracted=answer)

    monkeypatch.setattr(grader, "check", check)
    for answer in ("a", "b", "a", "c", "a", "b", "t", "t", "i", "i"):
        await graded(grader, answer, 5)
    assert checks == ["a", "b", "c", "b", "t", "i", "i"]


@pytest.mark.long
async def test_when_the_caller_who_checks_is_cancelled_another_takes_over(monkeypatch):
    began, go_on = asyncio.Event(), asyncio.Event()

    async def check(answer, golds):
        began.set()
        await go_on.wait()
        return await MathGrader.check(grader, answer, golds)

    async with MathGrader() as grader:
        monkeypatch.setattr(grader, "check", check)
        first = asyncio.create_task(graded(grader, r"\sqrt{16}", 4))
        second = asyncio.create_task(graded(grader, r"\sqrt{16}", 4))
        await began.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go_on.set()
        assert math_outcome(await second) == CORRECT


PIECES = st.sampled_from(
    [*"0123456789+-*/^_=(){}[]<>!,.;:$%\\ xyzλé∞≤", "\\frac", "\\sqrt", "\\text{", "\\boxed{", "or", "\ud800"]
)


@pytest.mark.long
@settings(deadline=None, max_examples=120)
@given(
    text=st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=12).map("".join)),
    label=st.sampled_from([5, "x+1", "Monday", "50%"]),
)
def test_grading_never_raises_regardless_of_the_text(text, label):
    async def grade_all() -> None:
        for written in (text, f"\\boxed{{{text}}}", f"#### {text}"):
            grade = await default_grader().grade(written, label)
            assert math_outcome(grade) != "infra", grade

    asyncio.run(grade_all())


@pytest.mark.long
@pytest.mark.skipif(not GSM8K.exists(), reason=f"the GSM8K test set is not at {GSM8K.parent.name}/{GSM8K.name}")
async def test_gsm8k_gold_solutions_are_correct_and_perturbed_ones_wrong(shared):
    rows = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    grades = [await shared.grade(row, row) for row in rows]
    assert {math_outcome(grade) for grade in grades} == {CORRECT}
    perturbed = [
        f"#### {float(grade.extracted) + 1:g}" if "." in grade.extracted else f"#### {int(grade.extracted) + 1}"
        for grade in grades
    ]
    wrong = await asyncio.gather(*(shared.grade(text, row) for text, row in zip(perturbed, rows, strict=True)))
    assert {math_outcome(grade) for grade in wrong} == {WRONG}
    assert len(wrong) == 1319
