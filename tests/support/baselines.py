"""The teacher's side of a question, for tests of rewards."""

from qinglan.recipes import Baseline

BASELINE = Baseline(
    row_id="1",
    question="虾青素咋吃",
    gold_id="",
    teacher_rewrite="虾青素 服用方法",
    teacher_quality=0.5,
    teacher_judge=3.0,
)
