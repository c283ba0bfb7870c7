"""Personal numbers become placeholders; other numbers, and the question around them, stay."""

import time

import pytest

from qinglan.serving.redaction import redact

IDENTITY = "11010519491231002X"  # the example in GB 11643
CARD = "4111111111111111"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("我的手机是13812345678，能吃吗", "我的手机是[手机号]，能吃吗"),
        ("打138 1234 5678", "打[手机号]"),
        ("打138-1234-5678或者+86 19912345678", "打[手机号]或者[手机号]"),
        ("打１３８１２３４５６７８。", "打[手机号]。"),
        ("打138\u200b1234\u200b5678。", "打[手机号]。"),
        ("微信wx13812345678", "微信wx[手机号]"),
        (f"身份证{IDENTITY.lower()}，孕妇", "身份证[身份证号]，孕妇"),
        ("身份证１１０１０５１９４９１２３１００２Ｘ好", "身份证[身份证号]好"),
        ("卡号4111 1111 1111 1111扣钱", "卡号[银行卡号]扣钱"),
        ("卡号６２２２－０２１２－３４５６－７８９４", "卡号[银行卡号]"),
        ("写信到li.lei+a@mail.example.com.cn吧", "写信到[邮箱]吧"),
        ("写信到ｌｉ＠ｑｑ．ｃｏｍ吧", "写信到[邮箱]吧"),
        ("打（０１０）６２７５１２３４", "打[座机号]"),
        ("打0755 8888 6666转8001", "打[座机号]转8001"),
        ("打+86-21-62751234", "打[座机号]"),
        ("打+86 021-6275 1234", "打[座机号]"),
    ],
)
def test_numbers_of_people_are_replaced(text, expected):
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "每天吃2000毫克，连吃30天，行吗？",
        "批号20261121，国药准字Z20050228",
        "订单号202611210000012345",
        "12812345678 和 138123456789 不是手机号",
        "110105194912310021",  # check digit wrong
        "11010519491331002X",  # no such month
        "4111111111111112",  # no card by Luhn
        "温度是36.5，血压120/80，体重65.5",
        "比例1:2:3，2026-11-21，10:30",
        "@所有人",
        "",
        "Ａ１２３全角也原样",
    ],
)
def test_other_numbers_stay(text):
    assert redact(text) == text


def test_several_kinds_in_one_text():
    text = f"我叫李雷，{IDENTITY}，13812345678，li@qq.com，{CARD}，010-62751234"
    assert redact(text) == "我叫李雷，[身份证号]，[手机号]，[邮箱]，[银行卡号]，[座机号]"


@pytest.mark.parametrize("text", ["a" * 4000 + "@", "1 " * 2000, "1-" * 2000, "a.@" * 1300, "0" * 4000])
def test_nobody_can_make_it_slow(text):
    start = time.process_time()
    redact(text)
    assert time.process_time() - start < 0.5
