"""Questions for the benchmark: Chinese, all different, each with a profile and a history."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from qinglan.config import Tenant
from qinglan.recipes import get_recipe
from qinglan.rows import Row

THINGS = (
    "虾青素",
    "辅酶Q10",
    "鱼油",
    "叶黄素",
    "益生菌",
    "葡萄籽",
    "维生素D3",
    "钙镁片",
    "胶原蛋白肽",
    "奶蓟草",
)
ENDINGS = (
    "咋吃啊",
    "饭前吃还是饭后吃",
    "能跟降压药一起吃不",
    "吃多久管用",
    "小孩能吃吗",
    "一天几粒合适",
)
WHO = (
    "女，45岁，办公室职员，睡眠不好",
    "男，62岁，高血压，长期服药",
    "女，31岁，备孕中",
    "男，28岁，健身",
)
BEFORE = (
    "上次问过护肝片的用量，已回复每日两粒",
    "之前咨询过眼睛干涩怎么办",
    "最近问过体检报告里的指标",
)
Question = tuple[str, str, str]
"""Question, profile, history."""


def questions(count: int, start: int = 0) -> Iterator[Question]:
    """So many questions, from a number on."""
    for number in range(start, start + count):
        # The number makes each question another one, so that no cache can answer it.
        thing = THINGS[number % len(THINGS)]
        ending = ENDINGS[number // len(THINGS) % len(ENDINGS)]
        query = f"那个{thing}{number}号{ending}，我第{number}次问了"
        yield query, WHO[number % len(WHO)], BEFORE[number % len(BEFORE)]


def write_workbook(path: Path, rows: list[Question]) -> Path:
    """Write the questions in the form of a user's export."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("问题", "用户画像", "历史摘要"), *rows])
    return path


def write_prompts(path: Path, rows: list[Question], tenant: Tenant) -> Path:
    """Write our teacher's prompts for rivals, which have no recipe: id, system, user."""
    recipe = get_recipe("query_rewrite")
    with path.open("w", encoding="utf-8") as file:
        for number, (query, profile, history) in enumerate(rows):
            row = Row(
                id=f"{number:016x}",
                tenant=tenant.id,
                source="",
                query=query,
                profile=profile,
                history=history,
            )
            system, user = (message["content"] for message in recipe.teacher_messages(row, tenant))
            prompt = {"id": row.id, "system": system, "user": user}
            file.write(json.dumps(prompt, ensure_ascii=False) + "\n")
    return path
