"""Six-step web tasks: look up a customer, issue an invoice, look it up, an event's status, enrol in a course, sum up.

The order of the steps varies; every step needs something that an earlier result returned. `WebSite` is the world behind
the tools: it answers calls and so drives an evaluation step by step.
"""

import json

from . import words
from .tools import schema

TOOLS = (
    schema("find_customer", {"name": "string"}),
    schema("create_invoice", {"customer": "string", "amount": "integer"}),
    schema("get_invoice", {"invoice": "string"}),
    schema("event_status", {"event": "string"}),
    schema("enrol", {"customer": "string", "course": "string"}),
    schema("sum_amounts", {"first": "string", "second": "string"}),
)
FINAL = "All six steps are done. The total is {total}."


class WebSite:
    """A drawn task: its request text, and a world that answers the six calls with results nobody can guess."""

    def __init__(self, rng):
        self.customer = words.person(rng)
        self.amount = rng.randint(10, 999)
        self.event = rng.choice(words.COURSES) + " " + words.digits(rng, 2)
        self.customer_id = "C" + words.digits(rng, 4)
        self.invoice = "I" + words.digits(rng, 4)
        self.old_invoice = "I" + words.digits(rng, 4)
        self.course = words.code(rng)
        self.total = self.amount + rng.randint(10, 900)
        self.status = rng.choice(("open", "full soon", "moved"))
        # the event may come before the customer; all else follows from what it needs
        self.event_first = rng.random() < 0.5

    @property
    def request(self):
        event = f"get the status of event {self.event}"
        bill = f"find customer {self.customer}, issue an invoice of {self.amount}, look the invoice up"
        order = f"{event}, {bill}" if self.event_first else f"{bill}, {event}"
        return f"Please {order}, enrol the customer in the course and sum the two amounts."

    @property
    def calls(self):
        """The six right calls in order: [(function, arguments), ...]."""
        event = [("event_status", {"event": self.event})]
        bill = [
            ("find_customer", {"name": self.customer}),
            ("create_invoice", {"customer": self.customer_id, "amount": self.amount}),
            ("get_invoice", {"invoice": self.invoice}),
        ]
        tail = [
            ("enrol", {"customer": self.customer_id, "course": self.course}),
            ("sum_amounts", {"first": self.invoice, "second": self.old_invoice}),
        ]
        return (event + bill if self.event_first else bill + event) + tail

    def answer(self, function, arguments):
        """What the tool returns for a call, as text; an unknown or wrong call returns an error, as a real site would."""
        if (function, arguments) not in self.calls:
            return json.dumps({"error": "not found"})
        results = {
            "find_customer": {"customer": self.customer_id},
            "create_invoice": {"invoice": self.invoice},
            "get_invoice": {"amount": self.amount, "earlier": self.old_invoice},
            "event_status": {"status": self.status, "course": self.course},
            "enrol": {"seat": self.total % 90 + 1},
            "sum_amounts": {"total": self.total},
        }
        return json.dumps(results[function])

    @property
    def final(self):
        """The closing sentence once all six calls are answered."""
        return FINAL.format(total=self.total)
