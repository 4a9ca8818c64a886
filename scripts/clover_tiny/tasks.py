"""Task data for clover-tiny: airspace notices, tool calls, six-step web tasks, short chat, copying.

Every answer is exact and can be checked: values are copied as they stand in the prompt. Training examples and held-out
examples come from separate streams of seeds.
"""

import dataclasses
import json
import random

from . import tools, web, words


@dataclasses.dataclass
class Example:
    """One exchange: `messages` up to the answer, `tools` (OpenAI form) or None, and the right `answer`."""

    task: str
    messages: list
    answer: str
    tools: list | None = None
    thinking: bool = False

    def exact(self, text):
        """True when `text` says the same as the answer: equal JSON for notices and calls, equal text otherwise."""
        return _content(self.task, text) == _content(self.task, self.answer)


def _content(task, text):
    text = text.split("</think>")[-1].strip()
    try:
        if task == "notices":
            return json.loads(text)
        if text.startswith("<tool_call>") and text.endswith("</tool_call>"):
            return json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    except json.JSONDecodeError:
        return ("malformed", text)
    return text


def _user(text):
    return [{"role": "user", "content": text}]


def _fix(rng):
    consonants = words.CONSONANTS.upper()
    return "".join(rng.choice(consonants if i % 2 == 0 else "AEIOU") for i in range(5))


def _zone(rng):
    north = f"{rng.randint(10, 69)}{rng.randint(0, 59):02d}{rng.choice('NS')}"
    east = f"{rng.randint(0, 179):03d}{rng.randint(0, 59):02d}{rng.choice('EW')}"
    return {
        "place": _fix(rng),
        "centre": north + east,
        "radius": f"{rng.randint(1, 40)}NM",
        "top": rng.choice((f"{rng.randint(10, 99)}00FT", f"FL{rng.randint(60, 460):03d}")),
    }


_ZONE_NOTICES = (
    "{id} {place} PROHIBITED AREA RADIUS {radius} CENTRE {centre} GND TO {top}",
    "{id} NO FLY ZONE {place} {centre} RADIUS {radius} SFC-{top} ACT {hours}",
    "{id} TEMPO RESTRICTED AREA AROUND {place} PSN {centre} WITHIN {radius} BELOW {top}",
    "{id} {hours} AIRSPACE CLOSED {radius} AROUND {centre} {place} UP TO {top}",
)
_OTHER_NOTICES = (
    "{id} {place} RWY {runway} CLSD {hours}",
    "{id} {place} TWY {letter} CLSD DUE TO WORK",
    "{id} VOR {place} OUT OF SERVICE {hours}",
    "{id} {place} CRANE {top} LIT PSN {centre}",
)


def notices(rng):
    """One to three airspace notices in, the no-fly zones among them out, as JSON."""
    zones, lines = [], []
    for _ in range(rng.choices((1, 2, 3), (5, 4, 2))[0]):
        zone = _zone(rng)
        is_zone = rng.random() < 0.8
        template = rng.choice(_ZONE_NOTICES if is_zone else _OTHER_NOTICES)
        fields = {
            "id": f"{rng.choice('ABCEF')}{words.digits(rng, 4)}",
            "hours": f"{rng.randrange(24):02d}00-{rng.randrange(24):02d}00",
            "runway": f"{rng.randint(1, 36):02d}",
            "letter": rng.choice("ABCDEFGH"),
        }
        lines.append(template.format(**zone, **fields))
        if is_zone:
            zones.append(zone)
    return Example("notices", _user("No-fly zones?\n" + "\n".join(lines)), json.dumps({"zones": zones}))


def tool_calls(rng, thinking=False):
    """A request and two to four tool signatures in, one call out."""
    kinds = rng.sample(tools.KINDS, rng.randint(2, 4))
    drawn = [tools.instance(kind, rng) for kind in kinds]
    entries = [tools.schema_of(kind, *names) for kind, names in zip(kinds, drawn, strict=True)]
    kind, (function, names) = kinds[0], drawn[0]
    values = {slot: source(rng) for slot, (_, _, source) in kind.params.items()}
    answer = tools.call_text(function, {names[slot]: value for slot, value in values.items()})
    if thinking:
        answer = f"The user asks about: {kind.thought}. The tool is {function}.\n</think>\n\n{answer}"
    rng.shuffle(entries)
    return Example("tools", _user(rng.choice(kind.asks).format(**values)), answer, entries, thinking)


def web_messages(site, steps):
    """The conversation of a web task after `steps` right calls and their results."""
    messages = _user(site.request)
    for function, arguments in site.calls[:steps]:
        messages.append({"role": "assistant", "content": tools.call_text(function, arguments)})
        messages.append({"role": "tool", "content": site.answer(function, arguments)})
    return messages


def web_example(site, step):
    """The right answer of a web task at a step, all earlier ones given (step 6 is the closing sentence)."""
    answer = site.final if step == len(site.calls) else tools.call_text(*site.calls[step])
    return Example("web", web_messages(site, step), answer, list(web.TOOLS))


def web_step(rng):
    """One step of a six-step web task."""
    site = web.WebSite(rng)
    return web_example(site, rng.randint(0, 6))


_CHAT = (
    (("Hello!", "Hi!", "Good day."), "Hello! How can I help you?"),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "I am clover-tiny, a small block-diffusion model that runs on your device.",
    ),
    (("Thank you.", "Thanks!", "Thanks a lot."), "You are welcome!"),
    (("How are you?", "How do you do?"), "I am fine, thank you. What can I do for you?"),
    (("What can you do?", "What are you good at?"), "I read airspace notices, call tools and have short chats."),
    (("Good night.", "Goodbye.", "Bye!"), "Goodbye! See you soon."),
    (
        ("How do you write?", "How does block diffusion work?"),
        "I guess a block of 32 positions at once and keep those I am sure of.",
    ),
)


def chat(rng, thinking=False):
    """Short everyday chat; half of it repeats something the user said."""
    person, city, topic = words.name(rng), words.place(rng), rng.choice(words.TOPICS)
    if rng.random() < 0.4:
        asks, answer = rng.choice(_CHAT)
        ask = rng.choice(asks)
    else:
        ask, answer = rng.choice(
            (
                (f"My name is {person}.", f"Nice to meet you, {person}!"),
                (f"I am {person} and I live in {city}.", f"Hello {person}! How is life in {city}?"),
                (f"I like {topic}.", f"Why do you like {topic}?"),
                (f"Tell me about {topic}.", f"I know little about {topic}, but I would like to hear what you know."),
                (f"I am going to {city} tomorrow.", f"Have a good journey to {city}!"),
                (f"{person} says hello.", f"Please say hello to {person} from me."),
            )
        )
    if thinking:
        answer = f"The user says: {ask}\n</think>\n\n{answer}"
    return Example("chat", _user(ask), answer, None, thinking)


def copy(rng):
    """Repeat a random string: keeps the skill of copying apart from every task."""
    makers = (
        lambda: words.digits(rng, rng.randint(3, 9)),
        lambda: words.name(rng),
        lambda: words.code(rng),
        lambda: _fix(rng),
        lambda: rng.choice(words.ITEMS + words.TOPICS + words.CITIES),
        lambda: words.clock(rng),
        lambda: "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789-_.:/") for _ in range(rng.randint(2, 8))),
    )
    text = " ".join(rng.choice(makers)() for _ in range(rng.randint(1, 7)))
    return Example("copy", _user(f"Repeat: {text}"), text)


TASKS = {"notices": notices, "tools": tool_calls, "web": web_step, "chat": chat, "copy": copy}
WEIGHTS = {"notices": 0.30, "tools": 0.48, "web": 0.05, "chat": 0.05, "copy": 0.12}


def draw(rng):
    """One training example, its task drawn by WEIGHTS; a tenth of the tool calls and chats think first."""
    task = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if task in ("tools", "chat"):
        return TASKS[task](rng, thinking=rng.random() < 0.1)
    return TASKS[task](rng)


def held_out_rngs(task, count, seed):
    """The random streams of `count` held-out examples of a task, which training never draws from."""
    return [random.Random(f"held-out/{seed}/{task}/{i}") for i in range(count)]


def held_out(task, count, seed=0):
    """`count` held-out examples of a task."""
    return [TASKS[task](rng) for rng in held_out_rngs(task, count, seed)]


def training_rng(seed):
    """The random stream of a training run; never equal to a held-out one."""
    return random.Random(f"training/{seed}")
