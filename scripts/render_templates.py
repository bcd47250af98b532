#!/usr/bin/env python3
"""Renders chat templates of real models with Jinja2, for tests/templates.rs.

    python scripts/render_templates.py LLAMA_CPP > expected.json

LLAMA_CPP is the source of llama.cpp, as the Python package llama-cpp-python has it in vendor/llama.cpp. Taken from it
are the templates in models/templates, those in tests/test-chat-template.cpp, each with all conversations below, and the
templates of tests/test-jinja.cpp, each with its own variables.

Written is a list of [name, template, variables, text]; the text is null where Jinja2 fails. The environment is that of
transformers' apply_chat_template. Only jinja2 is needed.

    python scripts/render_templates.py --expressions tests/fixtures/templates/expressions.json

renders the templates of that file again. Add a template there with null after it, and run this.
"""

import copy
import datetime
import json
import pathlib
import re
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The block that marks what to train on."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def fail(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = fail
    env.globals["strftime_now"] = lambda pattern: datetime.datetime.now(datetime.timezone.utc).replace(
        tzinfo=None
    ).strftime(pattern)
    return env


# Conversations.

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup_weather",
            "description": "Weather now & soon in a <place>; say \"today\" or a date",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A town, e.g. Köln"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "days": {"type": "integer", "minimum": 1},
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds\npages",
            "parameters": {
                "type": "object",
                "properties": {
                    "words": {"type": "string"},
                    "only": {
                        "type": "object",
                        "properties": {
                            "language": {"type": ["string", "null"]},
                            "labels": {"type": "array", "items": {"type": "string"}},
                        },
                    },
                    "most": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                    "exact": {"type": "boolean", "default": False},
                },
                "required": ["words", "most"],
                "additionalProperties": False,
            },
        },
    },
]
WEATHER = {"place": "Köln", "days": 2}
FIND = {
    "words": "x <y> & 'z' \"q\"\nline \\ é🦙",
    "only": {"language": None, "labels": ["a", "b c"]},
    "most": 2.5,
    "exact": True,
}


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments, number="call00001"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, number="call00001", **more):
    return {"role": "tool", "content": text, "tool_call_id": number, **more}


def conversations():
    """Names, messages, and what else differs from a plain conversation."""
    ask = user("How is the weather?")
    calls = [call("lookup_weather", WEATHER)]
    two = [call("lookup_weather", WEATHER), call("find", {"words": "w", "most": 3}, "call00002")]
    thought = "First I look.\nThen I tell."
    return {
        "user": ([user("Good morning")], {}),
        "four": ([system("Be kind."), user("Hi"), assistant("Hello!"), user("And?")], {}),
        "no prompt": ([system("Be kind."), user("Hi"), assistant("Hello!")], {"add_generation_prompt": False}),
        "tools": ([ask], {"tools": TOOLS}),
        "tools, system": ([system("Be short."), ask], {"tools": TOOLS}),
        "call": ([ask, assistant("", tool_calls=calls), result('{"t": 21.5}')], {"tools": TOOLS}),
        "call, null": ([ask, assistant(None, tool_calls=calls), result('{"t": 21.5}')], {"tools": TOOLS}),
        "call, round": (
            [
                system("Be short."),
                ask,
                assistant("I look.", tool_calls=[call("find", FIND)]),
                result("plain <b> & é", name="find"),
                assistant("It is 21."),
                user("Thanks, and now?"),
            ],
            {"tools": TOOLS},
        ),
        "two calls": (
            [ask, assistant("", tool_calls=two), result("21"), result('["a", 1]', "call00002")],
            {"tools": TOOLS},
        ),
        "call, no tools": (
            [ask, assistant("", tool_calls=calls), result("21"), assistant("It is 21"), user("fine")],
            {},
        ),
        "reasoning": ([user("2+2?"), assistant("4", reasoning_content=thought), user("and 3+3?")], {}),
        "reasoning, call": (
            [ask, assistant("", reasoning_content=thought, tool_calls=calls), result("21")],
            {"tools": TOOLS},
        ),
        "reasoning, answer": (
            [
                ask,
                assistant("", reasoning_content=thought, tool_calls=calls),
                result("21"),
                assistant("21 C", reasoning_content="done"),
                user("sure?"),
            ],
            {"tools": TOOLS},
        ),
        "inline reasoning": ([user("2+2?"), assistant("<think>\nhm\n</think>\n\n4"), user("and 3+3?")], {}),
        "enable_thinking off": ([user("Hello")], {"enable_thinking": False}),
        "enable_thinking on": ([user("Hello")], {"enable_thinking": True}),
        "thinking off": ([system("Sys"), user("Hello")], {"thinking": False}),
        "thinking on": ([system("Sys"), user("Hello")], {"thinking": True}),
        "low effort": ([user("Hello")], {"reasoning_effort": "low"}),
        "high effort": ([user("Hello")], {"reasoning_effort": "high", "tools": TOOLS}),
        "odd texts": (
            [
                system(" \n sys <b> & \"q\" 's' {{x}} {% if %} \t"),
                user("  \n\n é🦙 <|x|> {{ messages }}\n  "),
                assistant("\n answer \n\n"),
                user(""),
            ],
            {},
        ),
        "continued": ([user("Tell me"), assistant("Once upon")], {"add_generation_prompt": False}),
        "two users": ([user("Hi"), user("again")], {}),
        "system only": ([system("Sys")], {}),
    }


def variables(messages, more):
    return {
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        **more,
        "messages": messages,
    }


# The C++ that templates are taken from.

SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "v": "\v", "f": "\f", "b": "\b", "a": "\a"}
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<space>\s+)"""
    r"""|(?P<raw>(?:u8)?R"(?P<mark>[^(]*)\((?P<body>.*?)\)(?P=mark)")"""
    r"""|(?P<text>(?:u8)?"(?P<inner>(?:[^"\\]|\\.)*)")|(?P<word>[\w.]+)|(?P<sign>.)""",
    re.S,
)


def unescaped(text):
    def one(match):
        letter = match[1]
        if letter[0] in "uUx":
            return chr(int(letter[1:], 16))
        return SIMPLE.get(letter, letter)

    return re.sub(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", one, text, flags=re.S)


def tokens(source):
    """Pairs of kind and text; adjacent strings are one."""
    found = []
    for match in TOKEN.finditer(source):
        if match["comment"] or match["space"]:
            continue
        if match["raw"] or match["text"]:
            text = match["body"] if match["raw"] else unescaped(match["inner"])
            if found and found[-1][0] == "text":
                text = found.pop()[1] + text
            found.append(("text", text))
        else:
            found.append(("word" if match["word"] else "sign", match["word"] or match["sign"]))
    return found


def is_sign(token, sign):
    return token == ("sign", sign)


def old_templates(source):
    """The second string of each entry in the list of test cases."""
    found = tokens(source[source.index("test_cases {") :])
    depth, texts = 0, []
    for token in found:
        if is_sign(token, "{"):
            depth += 1
            if depth == 2:
                texts = []
        elif is_sign(token, "}"):
            if depth == 2 and len(texts) > 1:
                yield texts[0], texts[1]
            depth -= 1
            if depth == 0:
                return
        elif token[0] == "text" and depth == 2:
            texts.append(token[1])


class Literal:
    """Reads a value of nlohmann's JSON as C++ writes it."""

    def __init__(self, found, at):
        self.found, self.at = found, at

    def take(self, sign):
        if is_sign(self.found[self.at], sign):
            self.at += 1
            return True
        return False

    def items(self, end):
        items = []
        while not self.take(end):
            items.append(self.value())
            self.take(",")
        return items

    def value(self):
        kind, text = self.found[self.at]
        if (kind, text) == ("sign", "{"):
            self.at += 1
            items = self.items("}")
            if all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in items):
                return dict(items)
            return items
        self.at += 1
        if kind == "text":
            return text
        if (kind, text) == ("sign", "-"):
            return -self.value()
        if text == "json":
            # json::array({…}), json::object(), json({…})
            if self.take("("):
                value = self.value()
                self.take(")")
                return value
            if self.take(":") and self.take(":"):
                form = self.found[self.at][1]
                self.at += 1
                if not self.take("("):
                    raise ValueError(form)
                items = self.items(")")
                value = items[0] if items else [] if form == "array" else {}
                return list(value.items()) if form == "array" and isinstance(value, dict) else value
            raise ValueError("json")
        if text in ("nullptr", "true", "false"):
            return {"nullptr": None, "true": True, "false": False}[text]
        return float(text) if "." in text else int(text)


def jinja_cases(source):
    found = tokens(source)
    for at in range(len(found) - 4):
        if found[at] == ("word", "test_template") and found[at + 2 : at + 4] == [("word", "t"), ("sign", ",")]:
            (kind, name), (kind2, template) = found[at + 4], found[at + 6]
            if kind == kind2 == "text":
                try:
                    yield name, template, Literal(found, at + 8).value()
                except (ValueError, TypeError):
                    print(f"skipped: {name}", file=sys.stderr)


def render_expressions(path):
    """One template in a line, with what it gives or null."""
    fixture = json.loads(path.read_text(encoding="utf-8"))
    env = environment()
    lines = []
    for template, _ in fixture["cases"]:
        try:
            text = env.from_string(template).render(**copy.deepcopy(fixture["variables"]))
        except Exception:  # whatever a template does
            text = None
        lines.append(json.dumps([template, text], ensure_ascii=False))
    variables = json.dumps(fixture["variables"], ensure_ascii=False)
    path.write_text(f'{{"variables": {variables},\n"cases": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def main():
    if sys.argv[1] == "--expressions":
        return render_expressions(pathlib.Path(sys.argv[2]))
    root = pathlib.Path(sys.argv[1])
    env = environment()
    cases = []

    def add(name, template, context, compiled):
        try:
            text = compiled.render(**copy.deepcopy(context))
        except Exception:  # whatever a template does
            text = None
        cases.append([name, template, context, text])

    def compiled(template):
        try:
            return env.from_string(template)
        except jinja2.TemplateSyntaxError:
            return None

    named = [
        (f"templates/{path.stem}", path.read_bytes().decode()) for path in sorted(root.glob("models/templates/*.jinja"))
    ]
    older = (root / "tests/test-chat-template.cpp").read_text(encoding="utf-8")
    named += [(f"older/{name}", template) for name, template in old_templates(older)]
    for name, template in named:
        ready = compiled(template)
        for form, (messages, more) in conversations().items():
            add(f"{name}: {form}", template, variables(messages, more), ready)
    source = (root / "tests/test-jinja.cpp").read_text(encoding="utf-8")
    for name, template, context in jinja_cases(source):
        add(f"jinja/{name}", template, context, compiled(template))
    json.dump(cases, sys.stdout, ensure_ascii=False)


if __name__ == "__main__":
    main()
