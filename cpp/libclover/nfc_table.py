"""Write the tables of Unicode canonical normalisation that src/normalise.cpp includes, from Python's unicodedata.

Usage: nfc_table.py OUTPUT. Terms: Unicode Standard Annex 15.
"""

import sys
import unicodedata


def canonical(code):
    """The canonical decomposition of a code point, one level, as a list of code points; [] if there is none."""
    parts = unicodedata.decomposition(chr(code)).split()
    return [] if not parts or parts[0].startswith("<") else [int(part, 16) for part in parts]


def tables():
    """(combining class runs, decompositions, primary compositions), each sorted."""
    runs, decompositions, compositions = [], [], []
    for code in range(sys.maxunicode + 1):
        ccc = unicodedata.combining(chr(code))
        if ccc and runs and runs[-1][1] == code - 1 and runs[-1][2] == ccc:
            runs[-1][1] = code
        elif ccc:
            runs.append([code, code, ccc])
        parts = canonical(code)
        if parts:
            decompositions.append([code, parts[0], parts[1] if len(parts) == 2 else 0])
        if len(parts) == 2 and unicodedata.normalize("NFC", chr(code)) == chr(code):
            compositions.append([*parts, code])
    return runs, decompositions, sorted(compositions)


def main(output):
    """Write the three tables as C++ arrays."""
    names = "COMBINING_CLASSES", "DECOMPOSITIONS", "COMPOSITIONS"
    with open(output, "w", encoding="ascii") as file:
        file.write(f"// Unicode {unicodedata.unidata_version}; written by nfc_table.py\n")
        for name, table in zip(names, tables(), strict=True):
            rows = "\n".join("{" + ", ".join(f"0x{value:x}" for value in row) + "}," for row in table)
            file.write(f"static const uint32_t {name}[][3] = {{\n{rows}\n}};\n")


if __name__ == "__main__":
    main(sys.argv[1])
