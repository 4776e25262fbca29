"""Strings that tell tokenizers apart. Used by the tests of tokenizers, detokenizers and the gateway."""

import random

STRINGS = [
    "",
    "a",
    " ",
    "Hello world",
    " Hello  world   and    more",
    "trailing spaces   ",
    "\n",
    "\n\n\n \n\t\t\n",
    "line\r\nline\rline\n\n  indented\n\tTab\n",
    "don't I'LL THEY'RE we've he'D it's 'tis 'S",
    "123 1234567 3.14159 1,000,000 0x1F 1e-9 ½ ² ٣ 三 Ⅷ",
    "x=1;y=22;z=333",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n\n\nclass A(B):\n        pass\n",
    '<div class="a">&nbsp;</div> <!-- c --> #include <stdio.h>',
    "Grüße aus Köln, naïve façade, Ærøskøbing, ﬁne",
    "Привет, мир! Ελληνικά שלום עולם مرحبا بالعالم हिन्दी ไทย",
    "日本語のテキスト、中文字符。한국어 텍스트",
    "😀 😃😄 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "é ñ ộ ẛ̣",  # composed
    "\u00a0non\u2003breaking\u200bzero\ufeffwidth",
    "\x00\x01\x1b[0m\x7f",
    "\U0010ffff \ue000 \ufffd",
    "🄯𝕳𝖊𝖑𝖑𝖔 𒀀",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|endoftext|> <|im_start|>x<|im_start",
    "<think>hm</think> <think>",
    "<s> </s> <unk> [INST] <0x0A>",
    "ALL CAPS words MiXeD cAsE camelCaseWords snake_case_words kebab-case",
    "!!! ??? ... --- *** ((nested [brackets] {here})) $100 50% #tag @user",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\path\\to\\file",
    "a" * 300,
    "ab " * 100,
    "\t" * 40 + "x",
    " " * 100 + "x",
]

_LETTERS = "aeT 's\n\t1½é日😀_-.<|>\u200d\u0301\r"


def random_strings(count: int, seed: int = 7) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(_LETTERS, k=rng.randrange(1, 40))) for _ in range(count)]
