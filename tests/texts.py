"""Texts that tokenizers differ on, for tests of parity: written by hand, and mixed by a seeded generator."""

import random
import unicodedata

PIECES = [
    # code
    "def f(x: int) -> str:\n    return f'{x!r}'\n", "for (int i = 0; i < n; ++i) { a[i] ^= b[i] << 3; }",
    "#include <vector>\r\n", "SELECT * FROM t WHERE a >= 1.5e-3 AND b != 'x''y';",
    "fn main() -> Result<(), Box<dyn Error>> {\n\t\tOk(())\n}", "x=>x?.y??z",
    '{"a": [1, 2.5, null, true], "b": "\\u00e9\\n"}', "<div class='a'>&nbsp;&amp;</div>",
    "$ ls -la | grep '^d' > /dev/null 2>&1", "let s = `a${b}c`;", "std::cout << \"hi\" << '\\n';", "λ x → x ∘ f",
    "a_b__c___d", "camelCaseHTTPServer2Go", "```python\nprint(1)\n```",
    # contractions, punctuation
    "don't I'LL we'Ve it's 'tis 'S 'RE", "'''", "...", "!!!???", "—–-", "“quoted” ‘text’", "a.b,c;d:e", "(((])}", "$100.00",
    "50%", "#tag @user",
    # scripts
    "你好，世界！", "中文字符与English混排123", "「日本語」のテキスト", "ｶﾀｶﾅ カタカナ ひらがな", "한국어 문장입니다.",
    "각", "مرحبا بالعالم", "العَرَبِيَّةُ", "שלום עולם", "हिन्दी में क्षत्रिय", "বাংলা ভাষা", "தமிழ் மொழி",
    "ภาษาไทยไม่มีช่องว่าง", "Привет, мир", "Ελληνικά", "Tiếng Việt có dấu", "Zażółć gęślą jaźń", "İstanbul ıI", "ǅ ß ﬁ ﬀ",
    "ﷺ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𠀀𠮷", "Ⅷ ² ½ ①", "१२३ ٣٤٥ 百二十", "གྷ", "ᚠᛇᚻ",
    # emoji
    "😀", "👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇩🇪🇫🇷🇯🇵", "❤️", "1️⃣", "☺︎", "🧑🏿‍🚀", "\u200d", "\ufe0f",
    # digits
    "0", "12", "123", "1234567890", "3.14159", "1,000,000", "0x1F", "2026-12-03T11:50:19Z", "1e-9",
    # white space
    " ", "  ", "   ", " " * 7, " " * 33, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\r\n\r\n", " \n ", "\n \n",
    "\t \n\t", "\xa0", "\u3000", "\u2003", "\u200b", "\ufeff", "\u2028", "\x0b\x0c", "\x85", " a", "a ", "  a  b  ",
    # normal forms
    "é", "e\u0301", "Å", "A\u030a", "\u212b", "한", "\u1112\u1161\u11ab", "q\u0307\u0323", "\u0344", "\u0958", "\u2126",
    "ﬀ", "\ufb1d", "\U0001d15e", "\u0301", "각\u11a8", "\u0f73", "a\u0315\u0300\u05ae\u0062",
    # control, private use, unassigned, literal marks of other tokenizers
    "\x00", "\x01\x02", "\x1b[31m", "\x7f", "\ue000", "\U0010fffd", "\U000f0000", "\ufffd", "\uffff", "\u0378", "▁", "▁▁a",
    "Ġ", "Ċ", "<0x41>", "[PAD1]", "<s", "s>", "<|", "|>", "<unk",
    # words
    "the", "The quick brown fox", " jumps", "over", "antidisestablishmentarianism", "ABCabc", "xyzzy", "a" * 50, "ab" * 40,
]  # fmt: skip


def texts(specials, n, seed):
    """At least `n` texts without repetition: every piece, every special token in several settings, and random mixtures.

    specials: texts of the special tokens, found in a third of the mixtures.
    """
    draw = random.Random(seed)
    found = ["", *PIECES]
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        found += [unicodedata.normalize(form, piece) for piece in PIECES]
    for token in specials:
        found += [token, token * 2, f"a{token}b", f" {token} ", f"\n{token}\n\n", token[:-1], token[1:], f"{token[:-1]}{token}"]
        found += [f"e{token}\u0301", f"1{token}2", f"{token}é"]
    found = dict.fromkeys(found)
    while len(found) < n:
        parts = draw.choices(PIECES, k=draw.randrange(2, 9))
        if specials and draw.random() < 1 / 3:
            parts.insert(draw.randrange(len(parts)), draw.choice(specials))
        if draw.random() < 0.2:
            parts += [_character(draw) for _ in range(draw.randrange(1, 6))]
        found["".join(parts)] = None
    return list(found)


def byte_strings(n, seed):
    """`n` byte strings, most of them not UTF-8: random bytes, and texts cut, joined and damaged."""
    draw = random.Random(seed)
    found = []
    for i in range(n):
        data = bytearray("".join(draw.choices(PIECES, k=3)).encode() if i % 2 else draw.randbytes(draw.randrange(1, 12)))
        for _ in range(draw.randrange(4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        found.append(bytes(data[: draw.randrange(1, len(data) + 1)]))
    return found


def _character(draw):
    while True:
        code = draw.choice((draw.randrange(0x300), draw.randrange(0x3000), draw.randrange(0x10000), draw.randrange(0x110000)))
        if not 0xD800 <= code < 0xE000:
            return chr(code)
