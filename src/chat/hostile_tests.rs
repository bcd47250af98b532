//! Templates that exhaust memory or time, or break their parser: each ends, with an error that gives the reason, within
//! its limits.

use std::fmt::Write as _;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;

use super::ChatTemplate;
use super::jinja::{Limits, Spent};

/// Small, so that tests are quick. The time is for operations without another limit.
const LIMITS: Limits = Limits {
    steps: 200_000,
    value_bytes: 4 << 20,
    uncharged_bytes: 0,
    work: 32 << 20,
    output_bytes: 1 << 20,
    time: Duration::from_secs(60),
};

const STEPS: &str = "does not end within 200000 steps";
const VALUES: &str = "bytes, more than the 4194304 that a rendering may take";
const WORK: &str = "more than the 33554432 that a rendering may do";
const OUTPUT: &str = "writes more than the limit of 1048576 bytes";
const FAILED: &str = "the chat template failed";
const NESTED: &str = "values are nested more than 200 deep";
const ITSELF: &str = "contains itself";
const LOOPS: &str = "keeps more than 100 loops in its values";
const SYNTAX: &str = "syntax error";
/// It is rendered.
const FINE: &str = "";

fn render(source: &str, limits: &Limits) -> crate::Result<String> {
    let template = ChatTemplate::with_limits(source, *limits)?;
    template.render(&json!({"messages": [{"role": "user", "content": "hello"}]}))
}

fn check(source: &str, expected: &str) {
    let shown: String = source.chars().take(300).collect();
    match render(source, &LIMITS) {
        Ok(text) => assert!(expected == FINE, "{shown} gives {} bytes, not {expected:?}", text.len()),
        Err(error) => {
            let message = error.to_string();
            assert!(expected != FINE && message.contains(expected), "{shown}: {message}");
            assert!(message.len() < 4_000, "{shown}: the error has {} bytes", message.len());
            // The error's causes are included, as with --verbose.
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                assert!(cause.to_string().len() < 4_000, "{shown}");
                source = cause.source();
            }
            if [STEPS, VALUES, WORK, OUTPUT, LOOPS].contains(&expected) {
                assert!(error.hint().is_some_and(|hint| hint.contains("--chat-template FILE")), "{shown}");
            }
        }
    }
}

/// An operation that is repeated, with its previous result.
fn repeated(start: &str, step: &str, rest: &str) -> String {
    format!(
        "{{% set ns = namespace(s={start}) %}}{{% for i in range(9999) %}}{{% set ns.s = {step} %}}{{% endfor %}}{rest}"
    )
}

/// The same for operations that double their input.
fn doubled(start: &str, step: &str, rest: &str) -> String {
    repeated(start, step, rest).replace("9999", "40")
}

#[test]
fn what_doubles_is_bounded_by_its_bytes() {
    for step in [
        "ns.s ~ ns.s",
        "ns.s + ns.s",
        "ns.s * 2",
        "[ns.s, ns.s] | join",
        "[ns.s, ns.s] | join(ns.s)",
        "','.join([ns.s, ns.s])",
        "ns.s | replace('a', 'aa')",
        "ns.s.replace('a', 'aa')",
        "'%s%s' % (ns.s, ns.s)",
        "'%s%s' | format(ns.s, ns.s)",
        "'{0}{0}'.format(ns.s)",
        "'{a}{a}'.format_map({'a': ns.s})",
        "ns.s | center(ns.s | length * 2)",
        "ns.s.ljust(ns.s | length * 2)",
        "ns.s.translate({97: 'aa'})",
        "(ns.s ~ '&') | escape | forceescape ~ ns.s",
        "(ns.s, ns.s) | string",
        "[ns.s, ns.s] | tojson",
        "[ns.s, ns.s] | pprint",
        "(ns.s ~ ns.s).upper().lower().title().swapcase()",
    ] {
        check(&doubled("'a'", step, ""), VALUES);
    }
    for step in [
        "ns.s + ns.s",
        "ns.s * 2",
        "ns.s + ns.s | list",
        "(ns.s + ns.s)[::-1]",
        "(ns.s | list + ns.s | list) | sort",
        "(ns.s + ns.s) | reverse | list",
        "(ns.s + ns.s) | map('string') | list",
        "(ns.s + ns.s) | select('defined') | list",
    ] {
        check(&doubled("[1]", step, ""), VALUES);
    }
    for macros in [
        "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = m(ns.s) %}{% endfor %}",
        "{% macro m(s) %}{{ s }}{{ caller() }}{% endmacro %}{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set x %}{% call m(ns.s) %}{{ ns.s }}{% endcall %}{% endset %}{% set ns.s = x %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set x | upper %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
        "{% set ns = namespace(s='&') %}{% for i in range(60) %}{% autoescape true %}{% set x %}{{ ns.s ~ '' }}{% endset %}{% set ns.s = x ~ '' ~ x %}{% endautoescape %}{% endfor %}",
    ] {
        check(macros, VALUES);
    }
    // Shared elements are small, but are written in full.
    for rest in [
        "{{ ns.s }}",
        "{{ ns.s | string }}",
        "{{ ns.s | tojson }}",
        "{{ ns.s | pprint }}",
        "{{ '%s' % [ns.s] }}",
    ] {
        check(&doubled("[1]", "[ns.s, ns.s]", rest), VALUES);
    }
    check(&doubled("[1]", "{'a': ns.s, 'b': ns.s}", "{{ ns.s }}"), VALUES);
    for key in ["{(ns.s): 1}", "[ns.s] | unique | list", "ns.s in {}", "{}.get(ns.s)"] {
        check(&doubled("(1,)", "(ns.s, ns.s)", &format!("{{{{ {key} }}}}")), VALUES);
    }
    // The number of values equals the number of steps of a rendering.
    check(
        "{% for i in range(99999) %}{% for j in range(99) %}{% macro m() %}{{ i }}{% endmacro %}{% endfor %}{% endfor %}",
        VALUES,
    );
    check(
        "{% set ns = namespace(l=[]) %}{% for i in range(1500) %}{% set ns.l = ns.l + [range(999) | list] %}{% endfor %}",
        VALUES,
    );
    check(
        "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [{}.items] %}{% endfor %}",
        VALUES,
    );
}

#[test]
fn what_is_wide_is_paid_for_before_it_is_made() {
    for wide in [
        "'a' | center(1000000000)",
        "'a\nb' | indent(1000000000)",
        "('a\n' * 9999) | indent(9999)",
        "'a'.ljust(2000000000)",
        "'a'.rjust(2000000000, 'é')",
        "'a'.zfill(2000000000)",
        "'%2000000000d' | format(1)",
        "'%.2000000000f' | format(1.0)",
        "'%.2000000000d' % 1",
        "'%*d' % (2000000000, 1)",
        "'{:2000000000}'.format(1)",
        "'{:{}}'.format(1, 2000000000)",
        "'{:.2000000000f}'.format(1.0)",
        "[1] | batch(1000000000, 'x') | list",
        "[1] | slice(1000000000) | list",
        "[1] * 1000000000",
        "'a' * 10 ** 9",
        "range(9999) | join('a' * 10000)",
        "[1] | tojson(indent=1000000000)",
        "[[[1]]] | tojson(indent='a' * 1000000)",
        "'a\t'.expandtabs(1000000000)",
        "('a' * 1000000) | list",
        "('a ' * 1000000).split()",
        "('a,' * 1000000).split(',')",
        "('a\n' * 1000000).splitlines()",
        "('a ' * 1000000) | wordwrap(1)",
        "strftime_now('%A' * 1000000)",
        "raise_exception('a' * 50000000)",
        "('\\x01' * 2000000,) | string",
        "(('\\x01' * 2000000).encode(),) | string",
        "('é' * 1000000) | urlencode",
    ] {
        check(&format!("{{{{ ({wide}) | length }}}}"), VALUES);
    }
    for large in [
        "10 ** 10 ** 10",
        "10.0 ** 400",
        "2 ** 127 * 2",
        "1 // 0",
        "1 % 0",
        "range(1000000000)",
        "range(0, -100000000000, -1)",
        "range(0, 5, 0)",
        "99999999999999999999999999999999999999 * 99",
        "1 if loop.cycle() else 2",
    ] {
        check(&format!("{{{{ {large} }}}}"), FAILED);
    }
    for fine in [
        "'abc'[::-9223372036854775808] ~ 'abc'[9223372036854775807:]",
        "1.5 | round(2147483647) ~ 1.5 | round(-2147483648)",
        "-9223372036854775808 // -1",
        "{'b': 1, 'a': [1]} | dictsort",
        "messages | groupby('x')",
        // There is no order, and no panic.
        "(['nan' | float, 3, 1, 2] * 99) | sort | length",
        "'a' | truncate(9223372036854775807)",
    ] {
        check(&format!("{{{{ {fine} }}}}"), FINE);
    }
}

#[test]
fn loops_end() {
    check("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", STEPS);
    check("{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", OUTPUT);
    check(&format!("{{% for a in range(99) %}}{}{{% endfor %}}", "x".repeat(20_000)), OUTPUT);
    check("{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}", "recursion");
    check("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "recursion");
    check(
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        "recursion",
    );
    check(
        "{% macro m(n) %}{% if n < 9 %}{{ m(n + 1, *[1]) }}{{ m(n + 1, k=1) }}{{ varargs }}{{ kwargs }}{% endif %}{% endmacro %}{{ m(0) }}",
        FINE,
    );
    check(
        "{% macro m(n) %}{% if n < 90 %}{{ m(n + 1) }}{{ m(n + 1) }}{% endif %}{% endmacro %}{{ m(0) }}",
        "recursion",
    );
    check("{% block a %}{{ self.a() }}{% endblock %}", FAILED);
    for alone in ["include 'chat'", "extends 'chat'", "import 'chat' as c", "from 'chat' import c"] {
        check(&format!("{{% {alone} %}}"), "single file");
    }
}

#[test]
fn nesting_is_bounded() {
    check(&repeated("[]", "[ns.s]", ""), NESTED);
    check(&repeated("[]", "(ns.s,)", ""), NESTED);
    check(&repeated("[]", "{'a': ns.s}", ""), NESTED);
    check(&repeated("[]", "{'a': ns.s}.values()", ""), NESTED);
    check(&repeated("[]", "[ns.s] | batch(1) | list", ""), NESTED);
    check(&repeated("[]", "cycler(ns.s)", ""), NESTED);
    check(&repeated("[]", "joiner(ns.s)", ""), NESTED);
    check(&repeated("[]", "[[ns.s].copy]", ""), NESTED);
    for rest in
        ["{{ ns.s | tojson }}", "{{ ns.s }}", "{{ ns.s == ns.s | list }}", "{{ [ns.s, ns.s] | sort }}"]
    {
        check(&repeated("[]", "[ns.s]", rest).replace("9999", "198"), FINE);
    }
    // A chain of namespaces is deep, and is let go without a deep stack.
    check(&repeated("[]", "namespace(s=ns.s)", "{% set ns.s = 1 %}x"), FINE);
    check(&repeated("[]", "namespace(s=ns.s)", "{{ ns.s }}"), ITSELF);
    for keeper in ["ns.s", "[ns.s]"] {
        check(
            &format!(
                "{{% set ns = namespace(s=1) %}}{{% for i in range(9999) %}}{{% for x in [{keeper}] %}}{{% set ns.s = loop %}}{{% endfor %}}{{% endfor %}}"
            ),
            LOOPS,
        );
    }
    // Macros do not hold each other.
    check(
        "{% set ns = namespace(f=0) %}{% for i in range(1500) %}{% set p = ns.f %}{% macro m() %}{{ p }}{% endmacro %}{% set ns.f = m %}{% endfor %}x",
        FINE,
    );
    for (rest, expected) in [
        ("{{ ns }}", ITSELF),
        ("{{ ns.l | string }}", ITSELF),
        ("{{ ns.l == other.l }}", FINE),
        ("{{ ns.l | tojson }}", "not JSON serializable"),
        ("{{ ns.ns.ns.ns.l | length }}", FINE),
    ] {
        let knot = "{% set ns = namespace() %}{% set other = namespace() %}{% set ns.ns = ns %}{% set ns.l = [ns] %}{% set other.l = [other] %}";
        check(&format!("{knot}{rest}"), expected);
    }
    // The engine itself compares only strings.
    check(
        &doubled(
            "[1]",
            "[ns.s, ns.s]",
            "{% for i in [1, 2] %}{% set l = loop %}{{ l.changed(ns.s) }}{% endfor %}",
        ),
        VALUES,
    );
}

#[test]
fn rendering_needs_little_stack() {
    // Half the stack of the server's threads.
    let test = || {
        for calls in [
            "{% macro m(n) %}{{ m(n, *[1]) }}{{ varargs }}{% endmacro %}{{ m(0) }}",
            "{% macro m(n) %}{{ m(n, k=[m]) }}{{ kwargs }}{% endmacro %}{{ m(0) }}",
            "{% macro m() %}{% call m() %}{{ m() }}{% endcall %}{{ caller() }}{% endmacro %}{{ m() }}",
            "{% macro m() %}{% set x %}{% filter upper %}{{ m() }}{% endfilter %}{% endset %}{% endmacro %}{{ m() }}",
            "{% for x in [[1]] recursive %}{% with %}{{ loop([[1]]) }}{% endwith %}{% endfor %}",
        ] {
            check(calls, "recursion");
        }
        let deep = |step: &str, rest: &str| repeated("[1]", step, rest).replace("9999", "198");
        for rest in [
            "{{ ns.s | tojson(indent=1) | length }}",
            "{{ ns.s | pprint | length }}",
            "{{ ns.s == ns.s | list }}",
            "{{ ns.s < ns.s | list }}",
            "{{ [ns.s, ns.s | list] | sort | length }}",
        ] {
            check(&deep("[ns.s]", rest), FINE);
        }
        check(&deep("(ns.s | list, ns.s)[1:]", "{{ {ns.s: 1}[ns.s] }}"), FAILED);
        check(&deep("{'a': ns.s}", "{{ ns.s == ns.s.copy() }}{{ ns.s | tojson | length }}"), FINE);
    };
    std::thread::Builder::new().stack_size(1 << 20).spawn(test).unwrap().join().unwrap();
}

#[test]
fn sources_are_read_with_little_stack() {
    for nested in [
        format!("{}1{}", "(".repeat(20_000), ")".repeat(20_000)),
        format!("{}{}", "[".repeat(20_000), "]".repeat(20_000)),
        format!("{}1", "-".repeat(20_000)),
        format!("a{}", "|upper".repeat(20_000)),
        format!("a{}", "[0]".repeat(20_000)),
        format!("a{}", ".b".repeat(20_000)),
        format!("a{}", "()".repeat(20_000)),
        format!("{}2", "1 if 0 else ".repeat(20_000)),
        format!("1{}", " or 1".repeat(20_000)),
        format!("1{}", " and 1".repeat(20_000)),
        format!("1{}", " < 2".repeat(20_000)),
        format!("1{}", "+1".repeat(20_000)),
        format!("1{}", "~1".repeat(20_000)),
        format!("1{}", "**1".repeat(20_000)),
        format!("1{}", " is defined".repeat(20_000)),
        format!("{}1{}", "{'a':".repeat(20_000), "}".repeat(20_000)),
        format!("{}1{}", "f(".repeat(20_000), ")".repeat(20_000)),
        format!("f({})", "1,".repeat(20_000)),
        "a".repeat(5_000),
        "9".repeat(20_000),
        "'\\ud800'".to_owned(),
    ] {
        check(&format!("{{{{ {nested} }}}}"), SYNTAX);
    }
    check(&format!("{{{{ {}1 }}}}", "not ".repeat(20_000)), FINE);
    check(&format!("{{{{ [{}] | length }}}}", "1,".repeat(20_000)), FINE);
    check(&format!("{{{{ ('{}') | length }}}}", "a".repeat(1_000_000)), FINE);
    let blocks = |begin: &str, end: &str| format!("{}x{}", begin.repeat(10_000), end.repeat(10_000));
    for (begin, end) in [
        ("{% if 1 %}", "{% endif %}"),
        ("{% for a in [1] %}", "{% endfor %}"),
        ("{% with %}", "{% endwith %}"),
        ("{% filter upper %}", "{% endfilter %}"),
        ("{% macro m() %}", "{% endmacro %}"),
        ("{% call m() %}", "{% endcall %}"),
        ("{% set a %}", "{% endset %}"),
        ("{% autoescape true %}", "{% endautoescape %}"),
    ] {
        check(&blocks(begin, end), "blocks are nested");
    }
    check(&format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(20_000)), "blocks are nested");
    // Branches one after the other are not.
    check(&"{% if 0 %}{% elif 0 %}{% elif 1 %}x{% endif %}".repeat(200), FINE);
    check(&format!("{{% macro m({}) %}}{{% endmacro %}}", "a,".repeat(20_000)), SYNTAX);
    check(&format!("{{% for {}1{} in a %}}{{% endfor %}}", "(".repeat(20_000), ")".repeat(20_000)), SYNTAX);
    check(&"{# ".repeat(20_000), "a comment has no end");
    check(&"{{ ".repeat(20_000), SYNTAX);
    check(&"{% raw %}".repeat(20_000), "a raw block has no end");
}

#[test]
fn errors_repeat_little_of_what_they_are_about() {
    let long = "'é' * 500000";
    for wrong in [
        format!("raise_exception({long})"),
        format!("messages | first(**{{{long}: 1}})"),
        format!("messages | attr({long}) + {{}}"),
        format!("'%({long})s' % {{}}"),
        format!("('%(' ~ {long} ~ ')s') % {{}}"),
        format!("('{{' ~ {long} ~ '}}').format()"),
        format!("('{{0!' ~ {long} ~ '}}').format(1)"),
        format!("('{{:' ~ {long} ~ '}}').format(1)"),
        format!("({{({long}) ~ ' ': 1}} | xmlattr)"),
        format!("[1] | select({long}) | list"),
        format!("[1] | map({long}) | list"),
        format!("namespace(**{{'_' ~ {long}: 1}})"),
        format!("dict(1, **{{{long}: 1}})"),
        format!("range(**{{{long}: 1}})"),
        format!("range({long})"),
        format!("[1] | sum(start={long})"),
        format!("none[{long}] + none"),
    ] {
        let source = format!("{{{{ {wrong} }}}}");
        let error = render(&source, &LIMITS).unwrap_err();
        let mut whole = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            write!(whole, "{cause} {cause:?}").unwrap();
            source = cause.source();
        }
        assert!(whole.len() < 40_000, "{wrong}: {} bytes: {}", whole.len(), &error.to_string()[..200]);
    }
}

/// Things to do a hundred million times, with little to show for it.
const WORKS: [&str; 32] = [
    "l | sum",
    "l | tojson",
    "l | unique | list",
    "l | sort",
    "l | sort(reverse=true)",
    "s | upper",
    "s | replace('b', 'c')",
    "'b' in s",
    "9999 in l",
    "s | length",
    "s[-1]",
    "s[::-1]",
    "l == m",
    "l < m",
    "l[::-1]",
    "s.split('b')",
    "s.strip(s)",
    "s | trim(s)",
    "s | int(base=16)",
    "s | float",
    "s is lower",
    "s | wordcount",
    "s | wordwrap(99999)",
    "w | wordwrap(1)",
    "w | wordwrap(7, break_long_words=false)",
    "s.startswith(s)",
    "l.index(9998)",
    "lipsum(*l)",
    "namespace(**{'a': l})",
    "nested == [nested[0], nested[1]]",
    "{s: 1}[s]",
    "[ns] | map(attribute=path) | list | length",
];

fn working(work: &str) -> String {
    let nested = "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{% set nested = ns.s %}{% set ns.a = ns %}";
    let values = "{% set s = 'é' * 20000 %}{% set w = 'a' * 20000 %}{% set path = 'a' ~ '.a' * 9999 %}{% set l = range(9999) | list %}{% set m = range(9999) | list %}";
    format!(
        "{nested}{values}{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{% set x = {work} %}}{{% endfor %}}{{% endfor %}}"
    )
}

#[test]
fn work_that_leaves_nothing_ends_too() {
    let limits = Limits { steps: u64::MAX >> 1, value_bytes: usize::MAX, work: usize::MAX, ..LIMITS };
    for work in WORKS {
        let source = working(work);
        let by_clock = Limits { time: Duration::from_millis(20), ..limits };
        let error = render(&source, &by_clock).unwrap_err();
        assert!(
            error.message().contains("takes longer than the 20ms of a processor's time"),
            "{work}: {error}"
        );
        let by_work = Limits { work: 4 << 20, ..limits };
        let error = render(&source, &by_work).unwrap_err();
        assert!(error.message().contains("more than the 4194304 that a rendering may do"), "{work}: {error}");
    }
    // The engine's own steps are not counted here, but the clock is checked.
    let limits = Limits { time: Duration::from_millis(20), ..limits };
    let loops = |inner: &str| {
        format!(
            "{{% macro m() %}}{{% endmacro %}}{{% for i in range(99999) %}}{{% for j in range(99999) %}}{inner}{{% endfor %}}{{% endfor %}}"
        )
    };
    let long = format!("{{% if messages[0]['{}'] %}}{{% endif %}}", "a".repeat(900_000));
    for inner in
        ["", "{% set x = i %}", "{% if m() %}{% endif %}", "{% for x in [] if x %}{% endfor %}", &long]
    {
        let error = render(&loops(inner), &limits).unwrap_err();
        assert!(error.message().contains("takes longer than"), "{error}");
    }
}

#[test]
fn what_is_over_stays_over() {
    let template = ChatTemplate::new("{{ ('a' * n) | length }}").unwrap();
    let limits = Limits { value_bytes: 1 << 20, ..LIMITS };
    let mut spent = Spent::default();
    let mut render = |n: usize| template.render_within(&json!({ "n": n }), &limits, &mut spent);
    // Each takes a third, and all have one budget.
    assert!(render(300_000).is_ok() && render(300_000).is_ok() && render(300_000).is_ok());
    assert!(render(300_000).unwrap_err().message().contains("more than the 1048576"));
    assert!(render(1).unwrap_err().message().contains("more than the 1048576"));
}

#[test]
fn a_template_is_tried_out_within_one_budget() {
    use super::tests::tokenizer;
    use crate::chat::{Chat, ChatConfig};
    let config = |template: &str| ChatConfig { template: Some(template.to_owned()), ..ChatConfig::default() };
    let tokenizer = tokenizer(None, &["<s>", "</s>"], true);
    // Each rendering uses a small part of its budget, and there are dozens.
    let source = "{% for i in range(99) %}{% set x = ('a' * 99999) | upper %}{% endfor %}{{ messages }}{{ tools }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}";
    let chat = Chat::with_config(&tokenizer, &config(source)).unwrap();
    let notice = chat.notice().or(chat.problem().map(str::to_owned)).unwrap_or_default();
    assert!(notice.contains("that a rendering may"), "{notice}");
    assert!(chat.render(&[crate::chat::Message::new("user", "x")], &Default::default()).is_ok());
}

#[test]
fn a_prompt_that_is_too_long_for_certain_is_not_tokenized() {
    use super::tests::tokenizer;
    let tokenizer = tokenizer(Some("{{ messages[0].content }}{{ 'a' * 1000 }}"), &["<s>", "</s>"], true);
    let chat = crate::chat::Chat::new(&tokenizer).unwrap();
    let messages = [crate::chat::Message::new("user", "x")];
    let encode = |most| chat.encode_within(&tokenizer, &messages, &Default::default(), (most, 7));
    assert!(encode(1001).is_ok());
    let error = encode(1000).unwrap_err();
    assert_eq!(error.kind(), crate::ErrorKind::ContextLength);
    assert!(error.message().contains("7 tokens") && error.message().contains("1001 bytes"), "{error}");
}

#[test]
fn values_are_taken_from_an_account() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static TAKEN: AtomicUsize = AtomicUsize::new(0);
    const MOST: usize = 8 << 20;
    let account = super::Account {
        take: |num_bytes| {
            let take = |taken: usize| taken.checked_add(num_bytes).filter(|sum| *sum <= MOST);
            TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
        },
        give_back: |num_bytes| {
            TAKEN.fetch_sub(num_bytes, Ordering::Relaxed);
        },
    };
    let render = |length: usize| {
        let template = ChatTemplate::new("{% set x = 'a' * n %}{{ x | length }}").unwrap();
        let rendered = super::on_account(account, || template.render(&json!({ "n": length })));
        assert_eq!(TAKEN.load(Ordering::Relaxed), 0);
        rendered
    };
    assert_eq!(render(6 << 20).unwrap(), (6 << 20).to_string());
    let error = render(16 << 20).unwrap_err();
    assert!(error.message().contains("bytes of memory for its values than there are"), "{error}");
    // So is the output, where it exceeds the conversation.
    let charged = |length: usize| {
        super::on_account(account, || {
            super::jinja::charged_for_text(length, || Ok(TAKEN.load(Ordering::Relaxed)))
        })
    };
    assert_eq!((charged(100).unwrap(), charged(100_000).unwrap()), (0, 1_600_000));
    assert!(charged(1 << 20).unwrap_err().message().contains("16777216 more bytes"));
    assert_eq!(TAKEN.load(Ordering::Relaxed), 0);
    assert!(ChatTemplate::new("{{ ('a' * 16777216) | length }}").unwrap().render(&json!({})).is_ok());
}

/// Expressions of all operators, filters, methods and tests, on the template's previous results.
fn expression() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("ns.a".to_owned()),
        Just("ns.b".to_owned()),
        Just("messages".to_owned()),
        Just("loop".to_owned()),
        (0_u64..2_000_000_000).prop_map(|number| number.to_string()),
        (0_usize..60).prop_map(|length| format!(
            "'{}'",
            "a é,%\n".chars().cycle().take(length).collect::<String>().replace('\n', "\\n")
        )),
        Just("range(9999)".to_owned()),
        Just("('nan' | float)".to_owned()),
        Just("m".to_owned()),
    ];
    leaf.prop_recursive(4, 24, 3, |inner| {
        let filters = super::jinja::filter_names();
        let methods = super::jinja::METHODS;
        let operators = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or"];
        prop_oneof![
            (inner.clone(), prop::sample::select(operators.to_vec()), inner.clone())
                .prop_map(|(a, operator, b)| format!("({a} {operator} {b})")),
            (inner.clone(), prop::sample::select(filters.clone()))
                .prop_map(|(a, filter)| format!("({a} | {filter})")),
            (inner.clone(), prop::sample::select(filters), inner.clone())
                .prop_map(|(a, filter, b)| format!("({a} | {filter}({b}))")),
            (
                inner.clone(),
                prop::sample::select(methods.to_vec()),
                prop::collection::vec(inner.clone(), 0..3)
            )
                .prop_map(|(a, method, arguments)| format!("{a}.{method}({})", arguments.join(", "))),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("[{a}, {b}]")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a}, {b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{{{a}: {b}}}")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{a}[{b}]")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("namespace(a={a}, b={b})")),
            inner.clone().prop_map(|a| format!("cycler({a}, *{a})")),
            inner.clone().prop_map(|a| format!("joiner({a})")),
            inner.clone().prop_map(|a| format!("m({a})")),
            inner.clone().prop_map(|a| format!("{a}[::-1]")),
            inner.clone().prop_map(|a| format!("(-{a})")),
            inner.clone().prop_map(|a| format!("loop.changed({a})")),
            (inner.clone(), inner).prop_map(|(a, b)| format!("({a} if {b} is defined else {b})")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn whatever_a_template_does_it_ends_within_its_limits(
        steps in prop::collection::vec((any::<bool>(), expression()), 1..5),
        turns in prop_oneof![Just(3_usize), Just(40), Just(99_999)],
        written in expression(),
    ) {
        // A step that fails ends the template, so each is tried alone and with the previous results.
        for count in 1..=steps.len() {
            let mut body = String::new();
            for (is_a, step) in &steps[..count] {
                write!(body, "{{% set ns.{} = {step} %}}", if *is_a { "a" } else { "b" }).unwrap();
            }
            let source = format!(
                "{{% macro m(x) %}}{{{{ x }}}}{{{{ x }}}}{{% endmacro %}}{{% set ns = namespace(a='a', b=[1]) %}}{{% for i in range({turns}) %}}{body}{{% endfor %}}{{{{ {written} }}}}"
            );
            let template = ChatTemplate::with_limits(&source, LIMITS);
            let Ok(template) = template else { continue };
            let mut spent = Spent::default();
            let rendered = template.render_within(&json!({"messages": ["hello"]}), &LIMITS, &mut spent);
            prop_assert!(spent.is_within(&LIMITS), "{source}: {spent:?}");
            match rendered {
                Ok(text) => prop_assert!(text.len() <= LIMITS.output_bytes),
                Err(error) => prop_assert!(error.to_string().len() < 4_000, "{source}"),
            }
        }
    }
}
