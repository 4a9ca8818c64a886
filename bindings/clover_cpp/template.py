"""Chat templates of model files: rendered in Jinja's sandbox, as Hugging Face renders them."""

import datetime
import json

import jinja2
import jinja2.ext
import jinja2.sandbox

from .errors import TemplateError


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message):
    raise jinja2.TemplateError(message)


def _environment():
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def render(source, messages, tools=None, **variables):
    """The text of `messages` up to where the answer begins, by the template `source`; `variables` are passed on to it.

    Raises TemplateError if the template is broken or refuses the messages.
    """
    try:
        template = _environment().from_string(source)
        return template.render(messages=messages, tools=tools, add_generation_prompt=True, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is broken at line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template refuses these messages: {error.message}") from error
    except Exception as error:  # the template is foreign code
        raise TemplateError(f"the chat template fails on these messages: {error!r}") from error
