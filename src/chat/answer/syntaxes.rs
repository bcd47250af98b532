//! The known tool-call formats, a row for each. More specific ones come first: at load, the first one that parses the
//! template's output is used.

use super::syntax::{ANY_TYPE, Body, CallIds, CallSyntax, Id, ObjectText, Pairs};

/// Calls as objects in JSON between two marks.
fn objects(name: &str, group: [&str; 2], separator: &str) -> CallSyntax {
    CallSyntax {
        name: name.into(),
        group: group.map(str::to_owned),
        separator: separator.into(),
        ..CallSyntax::default()
    }
}

/// Calls as a name and arguments in JSON: before the name, between them, and after the arguments.
fn named(name: &str, marks: [&str; 3]) -> CallSyntax {
    let [open, after_name, close] = marks.map(str::to_owned);
    CallSyntax { name: name.into(), open, after_name, close, body: Body::Json, ..CallSyntax::default() }
}

/// Calls as a name, and keys and values without quotes: the marks around the name, around a key, after a value and
/// after the call.
fn tagged(name: &str, marks: [&str; 6]) -> CallSyntax {
    let [_, _, key, between, end, _] = marks.map(str::to_owned);
    let pairs = Pairs { key, between: vec![(ANY_TYPE, between)], end, ..Pairs::default() };
    CallSyntax { body: Body::Pairs(pairs), ..named(name, [marks[0], marks[1], marks[5]]) }
}

impl CallSyntax {
    fn in_group(self, before: &str, after: &str) -> Self {
        Self { group: [before.into(), after.into()], ..self }
    }

    fn between(self, separator: &str) -> Self {
        Self { separator: separator.into(), ..self }
    }

    fn each(self) -> Self {
        Self { is_each: true, ..self }
    }

    fn bare(self) -> Self {
        Self { is_bare: true, ..self }
    }

    fn also(self, aliases: &[&'static str]) -> Self {
        Self { aliases: aliases.to_vec(), ..self }
    }

    fn with_id(self, id: Id) -> Self {
        Self { id, ..self }
    }

    fn with_body(self, body: Body) -> Self {
        Self { body, ..self }
    }

    /// Marks between a key and its value that differ by the type of the value.
    fn by_type(mut self, marks: &[(&'static str, &str)]) -> Self {
        if let Body::Pairs(pairs) = &mut self.body {
            pairs.between = marks.iter().map(|(kind, mark)| (*kind, (*mark).to_owned())).collect();
        }
        self
    }

    fn with_quotes(mut self, quotes: [&'static str; 2]) -> Self {
        if let Body::Pairs(pairs) = &mut self.body {
            pairs.quotes = Some(quotes);
        }
        self
    }
}

/// All of them.
pub(super) fn known() -> Vec<CallSyntax> {
    let keys = |name: &'static str, arguments: &'static str| Body::Object(ObjectText::new(name, arguments));
    let after = |written: &str, marks: &[&str]| Id::After {
        written: written.into(),
        marks: marks.iter().map(|mark| (*mark).to_owned()).collect(),
    };
    let before = |written: &'static str, mark: &str| Id::Before { written, mark: mark.into() };
    vec![
        // Names, keys and values between marks.
        tagged(
            "glm45",
            ["<tool_call>", "", "¶<arg_key>", "</arg_key>¶<arg_value>", "</arg_value>", "¶</tool_call>"],
        )
        .between("¶")
        .also(&["glm47"]),
        tagged(
            "hunyuan",
            [
                "<tool_call:opensource>",
                "<tool_sep:opensource>¶",
                "<arg_key:opensource>",
                "</arg_key:opensource>¶<arg_value:opensource>",
                "</arg_value:opensource>\n",
                "</tool_call:opensource>\n",
            ],
        )
        .in_group("<tool_calls:opensource>\n", "</tool_calls:opensource>")
        .also(&["hy3"]),
        tagged("qwen3_coder", ["<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>"])
            .in_group("<tool_call>\n", "\n</tool_call>")
            .each()
            .between("\n")
            .also(&["qwen3_xml", "step3p5", "nemotron3"]),
        tagged("seed_oss", ["<function=", ">\n", "<parameter=", ">", "</parameter>\n", "</function>"])
            .in_group("<seed:tool_call>\n", "\n</seed:tool_call>")
            .each()
            .between("\n"),
        tagged(
            "minimax_m2",
            ["<invoke name=\"", "\">\n", "<parameter name=\"", "\">", "</parameter>\n", "</invoke>\n"],
        )
        .in_group("<minimax:tool_call>\n", "</minimax:tool_call>"),
        tagged(
            "muse",
            [
                "<atem:invoke name=\"",
                "\">\n",
                "<atem:parameter name=\"",
                "\">",
                "</atem:parameter>\n",
                "</atem:invoke>\n",
            ],
        )
        .in_group("<atem:function_calls>\n", "</atem:function_calls>"),
        dsml("deepseek_v32", ["<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"]),
        dsml("deepseek_v4", ["<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"]),
        tagged(
            "kimi_k3",
            [
                "<|open|>call tool=\"",
                "\"<|sep|>",
                "<|open|>argument key=\"",
                "",
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>",
            ],
        )
        .by_type(&[
            ("string", "\" type=\"string\"<|sep|>"),
            ("number", "\" type=\"number\"<|sep|>"),
            ("boolean", "\" type=\"boolean\"<|sep|>"),
            ("null", "\" type=\"null\"<|sep|>"),
            ("array", "\" type=\"array\"<|sep|>"),
            ("object", "\" type=\"object\"<|sep|>"),
        ])
        .with_id(after("\" index=\"#", &["\" index=\""]))
        .in_group("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        tagged("minicpm5", ["<function name=\"", "\">", "<param name=\"", "\">", "</param>", "</function>"])
            .with_quotes(["<![CDATA[", "]]>"])
            .between("\n"),
        minimax_m3(),
        // A name and JSON.
        CallSyntax {
            takes_objects: true,
            call_ids: CallIds::Nine,
            ..named("mistral", ["[TOOL_CALLS]", "[ARGS]", ""]).with_id(after("", &["[CALL_ID]"]))
        },
        named("deepseek_v3", ["<｜tool▁call▁begin｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"])
            .with_id(before("function", "<｜tool▁sep｜>"))
            .in_group("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
            .between("\n")
            .also(&["deepseek_r1"]),
        named("deepseek_v31", ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"])
            .in_group("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        CallSyntax {
            prefix: "functions.",
            call_ids: CallIds::Numbered,
            ..named("kimi_k2", ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"])
                .with_id(after(":#", &[":"]))
                .in_group("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
        },
        named("solar", ["<|tool_call:begin|>", "<|tool_call:args|>", "<|tool_call:end|>"])
            .with_id(before("call#", "<|tool_call:name|>"))
            .in_group("<|tool_calls|>", "<|calls|>"),
        named("openai", [" to=functions.", "<|message|>", "<|call|>"])
            .with_id(after("<|channel|>commentary json", &["<|channel|>", "<|constrain|>"]))
            .also(&["gpt_oss", "harmony"]),
        named("functionary_v3.1", ["<function=", ">", "</function>"]),
        CallSyntax {
            no_name: Some("all"),
            ..named("functionary_v3.2", [">>>", "\n", ""]).bare().also(&["functionary"])
        },
        // Objects in JSON.
        objects("hermes", ["<tool_call>\n", "\n</tool_call>"], "\n").each().also(&["qwen", "longcat"]),
        objects("apriel", ["<tool_calls>[", "]</tool_calls>"], ", "),
        objects("minimax", ["<tool_calls>\n", "\n</tool_calls>"], "\n"),
        objects("nemotron_json", ["<TOOLCALL>[", "]</TOOLCALL>"], ", "),
        objects("cohere", ["<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"], ",\n    ")
            .with_body(keys("{\"tool_call_id\": \"#\", \"tool_name\": ", ", \"parameters\": "))
            .also(&["command_r7b", "cohere2"]),
        objects("command_r", ["Action:\n```json\n[\n    ", "\n]```"], ",\n    ")
            .with_body(keys("{\n        \"tool_name\": ", ",\n        \"parameters\": ")),
        objects("apertus", ["<|tools_prefix|>[", "]<|tools_suffix|>"], ", ").with_body(Body::Keyed),
        objects("phi4_mini_json", ["<|tool_call|>[", "]<|/tool_call|>"], ", "),
        objects("granite", ["<|tool_call|>[", "]"], ", "),
        objects("gigachat3", ["<|message_sep|>\n\nfunction call<|role_sep|>\n", ""], "").each(),
        objects("gigachat31", ["<|function_call|>", ""], "").each(),
        objects("firefunction", [" functools[", "]"], ", "),
        CallSyntax { call_ids: CallIds::Nine, ..objects("mistral_list", ["[TOOL_CALLS][", "]"], ", ") },
        // Literals as in Python.
        CallSyntax {
            open: "<|tool_call>call:".into(),
            close: "<tool_call|>".into(),
            body: Body::Braces { quote: "<|\"|>" },
            ..objects("gemma4", ["", ""], "")
        },
        objects("lfm2", ["<|tool_call_start|>[", "]<|tool_call_end|>"], ", ").with_body(Body::Python),
        // Only the call itself.
        objects("llama3_json", ["<|python_tag|>", ""], "; ")
            .bare()
            .with_body(keys("{\"name\": ", ", \"parameters\": "))
            .also(&["llama4_json"]),
        objects("xlam", ["[", "]"], ", ").bare(),
        objects("pythonic", ["[", "]"], ", ").bare().with_body(Body::Python).also(&["llama4_pythonic"]),
    ]
}

/// DeepSeek's marks, which show whether a value is a text.
fn dsml(name: &str, group: [&str; 2]) -> CallSyntax {
    tagged(
        name,
        [
            "<｜DSML｜invoke name=\"",
            "\">\n",
            "<｜DSML｜parameter name=\"",
            "",
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n",
        ],
    )
    .by_type(&[("string", "\" string=\"true\">"), (ANY_TYPE, "\" string=\"false\">")])
    .in_group(group[0], group[1])
}

/// Marks within values, too: a key is a mark, and elements of lists are items.
fn minimax_m3() -> CallSyntax {
    let mut syntax = tagged(
        "minimax_m3",
        [
            "]<]minimax[>[<invoke name=\"",
            "\">",
            "]<]minimax[>[<",
            ">",
            "]<]minimax[>[</",
            "]<]minimax[>[</invoke>\n",
        ],
    )
    .in_group("]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>");
    if let Body::Pairs(pairs) = &mut syntax.body {
        pairs.item = Some("item");
    }
    syntax
}
