"""Text to train on that is the same for every interpreter, commit and machine: code-like files, drawn by a seed."""

import random

SYLLABLES = [consonant + vowel for vowel in "eaiou" for consonant in "rtnsldmcpfbgh"]
LINES = (
    "import {}.{}",
    "from {} import {}, {}",
    "def {}_{}({}, {}):",
    '    """{} the {} of a {}."""',
    "    if {} is not None and {}.{}:",
    "    {} = {}[{}]",
    "    for {} in {}({}):",
    "        {}.{}({}, {}={})",
    "        raise ValueError({})",
    "    return {}.{}({})",
    "class {}({}):",
    "",
)


def write(folder, files=24, lines=200, words=400):
    """Writes files of lines whose words are the more frequent the earlier they were made; returns the folder."""
    draw = random.Random(0).random  # the one method of which Python says that its numbers stay

    def one_of(values):
        return values[int(len(values) * draw() ** 2)]

    known = ["".join(one_of(SYLLABLES) for _ in range(1 + int(3 * draw()))) for _ in range(words)]
    folder.mkdir()
    for number in range(files):
        forms = [one_of(LINES) for _ in range(lines)]
        text = [form.format(*(one_of(known) for _ in range(form.count("{}")))) for form in forms]
        (folder / f"{number}.py").write_text("\n".join(text) + "\n")
    return folder
