"""The tools clover-tiny is taught to call: names, parameters, and what people say who want them.

Function and parameter names come in variants, drawn anew for every example, so that a call can only be right when the
signatures in the prompt were read.
"""

import dataclasses
import json

from . import words


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of tool: `params` maps a slot to (name variants, JSON type, value source); `asks` are request templates."""

    names: tuple
    params: dict
    asks: tuple
    thought: str


def _choice(values):
    return lambda rng: rng.choice(values)


def _number(low, high):
    return lambda rng: rng.randint(low, high)


KINDS = (
    Kind(
        ("get_weather", "weather", "forecast"),
        {"p": (("city", "place"), "string", words.place), "d": (("date", "day"), "string", words.date)},
        ("What is the weather in {p} on {d}?", "Weather for {p}, {d} please.", "On {d} I am in {p}. Will it rain?"),
        "weather",
    ),
    Kind(
        ("set_alarm", "alarm", "wake_me"),
        {"t": (("time", "at"), "string", words.clock)},
        ("Wake me at {t}.", "Set an alarm for {t}.", "I must get up at {t}."),
        "alarm",
    ),
    Kind(
        ("set_timer", "timer", "count_down"),
        {"n": (("minutes", "length"), "integer", _number(1, 90))},
        ("Set a timer for {n} minutes.", "Tell me when {n} minutes are over.", "Timer, {n} minutes."),
        "timer",
    ),
    Kind(
        ("book_table", "reserve_table", "table"),
        {
            "r": (("restaurant", "where"), "string", words.name),
            "n": (("people", "guests"), "integer", _number(1, 12)),
            "t": (("time", "at"), "string", words.clock),
        },
        ("Book a table for {n} at {r} at {t}.", "Table at {r} for {n} people, {t}.", "We are {n} and want to eat at {r} at {t}."),
        "table",
    ),
    Kind(
        ("find_train", "train_search", "trains"),
        {
            "a": (("origin", "start"), "string", words.place),
            "b": (("destination", "goal"), "string", words.place),
            "d": (("date", "day"), "string", words.date),
        },
        ("Find a train from {a} to {b} on {d}.", "I need a train to {b} from {a} on {d}.", "Trains {a} to {b}, {d}."),
        "train",
    ),
    Kind(
        ("send_message", "message", "text_person"),
        {"p": (("to", "person"), "string", words.person), "m": (("text", "body"), "string", lambda rng: rng.choice(MESSAGES)(rng))},
        ('Send "{m}" to {p}.', 'Write to {p}: "{m}"', 'Tell {p} this: "{m}"'),
        "message",
    ),
    Kind(
        ("convert_money", "exchange", "currency"),
        {
            "n": (("amount", "sum"), "integer", _number(2, 9999)),
            "a": (("source", "from_currency"), "string", _choice(("EUR", "USD", "GBP", "CHF", "NOK", "JPY"))),
            "b": (("target", "to_currency"), "string", _choice(("SEK", "PLN", "CZK", "INR", "CAD", "AUD"))),
        },
        ("How much is {n} {a} in {b}?", "Convert {n} {a} to {b}.", "Change {n} {a} into {b} please."),
        "money",
    ),
    Kind(
        ("set_light", "light", "dim_light"),
        {
            "r": (("room", "where"), "string", _choice(words.ROOMS)),
            "n": (("level", "percent"), "integer", _number(0, 100)),
        },
        ("Set the light in the {r} to {n} percent.", "Light {r}: {n} percent.", "Make the {r} light {n} percent."),
        "light",
    ),
    Kind(
        ("light_colour", "lamp_colour", "paint_light"),
        {"r": (("room", "where"), "string", _choice(words.ROOMS)), "c": (("colour", "shade"), "string", _choice(words.COLOURS))},
        ("Make the {r} light {c}.", "I want {c} light in the {r}.", "Colour of the {r} lamp: {c}."),
        "colour",
    ),
    Kind(
        ("add_to_list", "shopping_add", "buy_item"),
        {"i": (("item", "thing"), "string", _choice(words.ITEMS)), "n": (("count", "quantity"), "integer", _number(1, 40))},
        ("Put {n} {i} on my list.", "I need to buy {n} {i}.", "Shopping list: {n} {i}."),
        "shopping",
    ),
    Kind(
        ("track_parcel", "parcel_status", "parcel"),
        {"c": (("code", "number"), "string", words.code)},
        ("Where is my parcel {c}?", "Track parcel {c}.", "Has parcel {c} arrived?"),
        "parcel",
    ),
    Kind(
        ("play_music", "music", "start_song"),
        {"a": (("artist", "by"), "string", words.person), "n": (("volume", "loudness"), "integer", _number(1, 100))},
        ("Play {a} at volume {n}.", "Music by {a}, volume {n}.", "I want to hear {a}, loudness {n}."),
        "music",
    ),
    Kind(
        ("drive_to", "navigate", "route"),
        {
            "g": (("goal", "address"), "string", lambda rng: f"{words.name(rng)} Street {rng.randint(1, 199)}"),
            "p": (("city", "town"), "string", words.place),
        },
        ("Drive me to {g} in {p}.", "Route to {g}, {p}.", "Take me to {p}, {g}."),
        "route",
    ),
    Kind(
        ("move_arm", "arm", "robot_move"),
        {
            "x": (("x", "left"), "integer", _number(0, 999)),
            "y": (("y", "front"), "integer", _number(0, 999)),
            "z": (("z", "height"), "integer", _number(0, 999)),
        },
        ("Move the arm to {x}, {y}, {z}.", "Arm to position {x} {y} {z}.", "Robot, go to x {x}, y {y}, z {z}."),
        "arm",
    ),
    Kind(
        ("add_contact", "new_contact", "save_number"),
        {
            "p": (("name", "person"), "string", words.person),
            "n": (("phone", "number"), "string", lambda rng: "0" + words.digits(rng, rng.randint(6, 8))),
        },
        ("Save {p} with number {n}.", "New contact: {p}, {n}.", "The phone of {p} is {n}, please keep it."),
        "contact",
    ),
    Kind(
        ("add_event", "calendar_add", "plan_event"),
        {
            "e": (
                ("title", "event"),
                "string",
                lambda rng: f"{rng.choice(('lunch', 'meeting', 'call', 'walk'))} with {words.person(rng)}",
            ),
            "d": (("date", "day"), "string", words.date),
            "t": (("time", "at"), "string", words.clock),
        },
        ("Plan {e} on {d} at {t}.", "Calendar: {d}, {t}, {e}.", "I have {e} on {d}, {t}."),
        "calendar",
    ),
)

MESSAGES = (
    lambda rng: f"I will be {rng.randint(5, 59)} minutes late",
    lambda rng: f"see you in {words.place(rng)} at {words.clock(rng)}",
    lambda rng: f"please call {words.person(rng)}",
    lambda rng: f"the code is {words.digits(rng, 4)}",
    lambda rng: f"bring {rng.randint(2, 20)} {rng.choice(words.ITEMS)}",
)


def schema(function, properties):
    """An OpenAI-style tool entry. `properties` maps parameter names to JSON types; all are required."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": function, "parameters": parameters}}


def call_text(function, arguments):
    """The assistant's text for one call, in the template's JSON form."""
    body = json.dumps({"name": function, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def instance(kind, rng):
    """Draw names for one tool of this kind: (function name, {slot: parameter name})."""
    return rng.choice(kind.names), {slot: rng.choice(names) for slot, (names, _, _) in kind.params.items()}


def schema_of(kind, function, names):
    """The tool entry of a drawn instance."""
    return schema(function, {names[slot]: json_type for slot, (_, json_type, _) in kind.params.items()})
