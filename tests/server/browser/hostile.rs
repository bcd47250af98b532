//! Texts that try to become markup or script, wherever a text can come from; and servers that fail.

use serde_json::{Value, json};

use super::Page;
use super::scripted::{Reply, Scripted};

/// Sets `window.hit` if it ever runs.
const PAYLOADS: &[&str] = &[
    "<img src=x onerror=\"window.hit=1\">",
    "<script>window.hit=1</script>",
    "</script><script>window.hit=1</script>",
    "<svg onload=window.hit=1><animate onbegin=window.hit=1 attributeName=x></svg>",
    "<iframe srcdoc=\"<script>parent.hit=1</script>\"></iframe><object data=x><embed src=x>",
    "<style>@import 'http://outside.example/x.css';</style><link rel=stylesheet href=http://outside.example/y>",
    "<base href=http://outside.example/><form action=http://outside.example><button>x</button></form>",
    "<meta http-equiv=refresh content=\"0;url=http://outside.example\">",
    "[click](javascript:window.hit=1) [click](JaVaScRiPt:window.hit=1) [click]( javascript:window.hit=1 )",
    "[click](java\nscript:window.hit=1) [click](java&#115;cript:window.hit=1) [click](\\javascript:window.hit=1)",
    "[click](data:text/html,<script>parent.hit=1</script>) [click](vbscript:x) [click](file:///etc/passwd)",
    "[click](blob:http://a/b) [click](//outside.example) [click](/metrics) [click](about:blank)",
    "[click](https://bank.example@outside.example/) <https://bank.example:x@outside.example>",
    "<javascript:window.hit=1> javascript:window.hit=1 <data:text/html,x>",
    "![x](http://outside.example/tracker.png) ![x](javascript:window.hit=1) ![x](data:image/svg+xml,<svg onload=hit>)",
    "[a](https://a.example/\"onmouseover=\"window.hit=1) [a](https://a.example/'onclick='window.hit=1')",
    "[a](https://a.example \"\"onmouseover=\"window.hit=1\")",
    "[![x](javascript:window.hit=1)](javascript:window.hit=1) [[a](javascript:window.hit=1)](https://a.example)",
    "`<img src=x onerror=window.hit=1>` **<b onclick=window.hit=1>x</b>** &lt;script&gt;window.hit=1&lt;/script&gt;",
    "```html\n<img src=x onerror=window.hit=1>\n```\n~~~<script>window.hit=1</script>\nx\n~~~",
    "```\"><img/src=x/onerror=window.hit=1>\n<script>window.hit=1</script>",
    "| a | <img src=x onerror=window.hit=1> |\n|---|---|\n| <script>window.hit=1</script> | [x](javascript:window.hit=1) |",
    "# <script>window.hit=1</script>\n> <img src=x onerror=window.hit=1>\n- <svg/onload=window.hit=1>\n1. [x](javascript:window.hit=1)",
    "{{constructor.constructor('window.hit=1')()}} ${window.hit=1} <%= x %> __proto__ constructor",
    "\u{202e}gnp.exe\u{202c} \u{2066}a\u{2069} \u{200f}مرحبا\u{200e} \u{0}\u{1}\u{7f}\u{feff}\u{fffd}",
    "$<img src=x onerror=window.hit=1>$ \\(<script>window.hit=1</script>\\) $$<math><maction actiontype=statusline xlink:href=javascript:window.hit=1>x</maction></math>$$",
    "<math href=javascript:window.hit=1><mi xlink:href=javascript:window.hit=1 onclick=window.hit=1>x</mi><annotation-xml encoding=text/html><img src=x onerror=window.hit=1></annotation-xml></math>",
    "$\\href{javascript:window.hit=1}{x} \\url{javascript:window.hit=1} \\includegraphics{http://outside.example/x.png}$",
    "$\\htmlData{onclick=window.hit=1}{x} \\htmlId{log}{x} \\class{message}{x} \\style{background:url(http://outside.example)}{x} \\cssId{a}{b}$",
    "$\\text{</mtext><script>window.hit=1</script>} \\color{url(http://outside.example)} \\textcolor{red;x:url(javascript:x)}{x} \\hspace{1em;x} \\mspace{x}$",
    "$$\\begin{array}{c|\\\"onclick=window.hit=1} x \\end{array} \\begin{<script>} \\operatorname{<b onclick=x>} \\tag{<script>window.hit=1</script>}$$",
    "$$\\def\\a{\\a\\a}\\a \\newcommand{\\b}{\\b\\b}\\b \\constructor \\__proto__ \\toString{x} \\begin{constructor}x\\end{constructor}$$",
    "```math\n</annotation></semantics></math><img src=x onerror=window.hit=1>\n```\n\\[\n<annotation-xml encoding=\"text/html\"><script>window.hit=1</script>\n\\]",
    "\u{2028}\u{2029}<!--<script>window.hit=1//--> <![CDATA[<script>window.hit=1</script>]]> <?xml?>",
];

/// What must not be on the page: elements that neither the document nor Markdown has, attributes that run, links
/// that lead elsewhere than to the web.
const FORBIDDEN: &str = "(() => {
    const names = 'DIV H1 H2 H3 H4 H5 H6 P SPAN A BR CODE PRE EM STRONG DEL UL OL LI BLOCKQUOTE HR TABLE THEAD TBODY TR TH TD \
        BUTTON ARTICLE DETAILS SUMMARY SUP TEXTAREA'.split(' ');
    const formulas = 'math semantics annotation mrow mi mo mn mtext mspace mfrac msqrt mroot msub msup msubsup munder mover \
        munderover mtable mtr mtd mstyle mphantom mpadded'.split(' ');
    const ofFormulas = 'accent accentunder class depth display displaystyle encoding form height linethickness lspace mathvariant \
        maxsize minsize movablelimits rspace scriptlevel stretchy symmetric width'.split(' ');
    const found = [];
    for (const node of document.querySelectorAll('#log *, #conversations *, #files *, #toast *, #facts *')) {
        const isFormula = node.namespaceURI.endsWith('/MathML');
        if (!(isFormula ? formulas : names).includes(node.nodeName)) found.push(node.outerHTML);
        for (const { name, value } of isFormula ? node.attributes : []) {
            if (!ofFormulas.includes(name) || !/^[a-z0-9.]+( lined| right)?$|^application.x-tex$/.test(value)) found.push(node.outerHTML);
        }
        for (const { name } of node.attributes) {
            if (name.startsWith('on') || ['src', 'srcdoc', 'action'].includes(name)) found.push(node.outerHTML);
        }
        if (node.nodeName === 'A' && !/^(https?|mailto):$/.test(node.protocol)) found.push(node.outerHTML);
        if (node.nodeName === 'A' && (node.username || node.target !== '_blank' || !node.rel.includes('noopener'))) {
            found.push(node.outerHTML);
        }
    }
    if (document.querySelectorAll('script').length !== 1) found.push('a script');
    if (document.querySelectorAll('#model *:not(option)').length) found.push('in the model');
    if (window.hit) found.push('a script ran');
    return found;
})()";

#[track_caller]
fn check(page: &Page, server: &Scripted, what: &str) {
    // Handlers of errors and loads run later.
    page.eval("new Promise((resolve) => setTimeout(resolve, 50))");
    assert_eq!(page.eval(FORBIDDEN), json!([]), "{what}");
    let outside = |url: &String| !url.starts_with(&server.url()) && !url.starts_with("data:image/svg");
    assert_eq!(page.requested().into_iter().find(outside), None, "{what}");
    assert_eq!(page.complaints(), Vec::<String>::new(), "{what}");
}

#[test]
fn no_text_becomes_markup_or_script() {
    let Some(page) = Page::start() else { return };
    let server = Scripted::start("<img src=x onerror=window.hit=1>");
    page.open(&server.url());
    page.until_ready();
    assert_eq!(page.text("document.querySelector('#model').value"), "<img src=x onerror=window.hit=1>");
    let mut count = 0;
    for (number, payload) in PAYLOADS.iter().enumerate() {
        // As an answer in chunks of several sizes, as reasoning, as a tool's call, and as what the user writes.
        let sizes = [1, 7, 1_000];
        let mut reply = Reply::text(payload, sizes[number % sizes.len()]);
        if let Reply::Deltas(deltas) = &mut reply {
            deltas.insert(0, json!({"reasoning_content": payload}));
            let call = json!({"index": 0, "function": {"name": payload, "arguments": payload}});
            deltas.push(json!({"tool_calls": [call]}));
        }
        server.will([reply]);
        page.write(payload);
        page.press("Enter");
        count += 2;
        page.until_messages(count);
    }
    check(&page, &server, "while it came");
    // Nothing was lost: the answer can be copied as it was.
    page.until_kept(count);
    let stored = page.records().remove(0);
    for (number, payload) in PAYLOADS.iter().enumerate() {
        assert_eq!(stored["messages"][2 * number + 1]["content"], **payload);
    }
    page.reload();
    page.until_messages(count);
    check(&page, &server, "from the store");
    // Links that are left lead where they say.
    let links =
        page.eval("[...document.querySelectorAll('#log a')].map((link) => link.hostname || link.href)");
    assert!(
        links
            .as_array()
            .unwrap()
            .iter()
            .all(|host| ["outside.example", "a.example", "a"].contains(&host.as_str().unwrap())),
        "{links}"
    );

    // As the words of an error.
    server.will([Reply::Status(400, "", json!({"error": {"message": PAYLOADS.join("\n")}}))]);
    page.write("x");
    page.press("Enter");
    page.until("document.querySelector('.failure')");
    assert_eq!(page.eval(FORBIDDEN), json!([]));
}

#[test]
fn a_store_that_others_wrote_is_read_with_care() {
    let Some(page) = Page::start() else { return };
    let server = Scripted::start("m");
    page.open(&server.url());
    let id = "0123456789abcdef01234567";
    let record = |messages: Value| {
        page.put_record(
            &json!({"id": id, "title": "<b onclick=hit=1>", "updated": "x", "messages": messages}),
        );
    };
    for (messages, settings, num_messages) in [
        (json!("{"), "[", 0),
        (json!(null), "null", 0),
        (json!([1]), "[]", 0),
        (json!({"length": 5}), r#"{"system": {}, "temperature": "1"}"#, 0),
        (
            json!([null, 1, {}, {"role": "system", "content": "x"}, {"role": "user", "content": {"x": 1}}]),
            "1",
            0,
        ),
        (
            json!([
                {"role": "user", "content": "a", "files": [{"name": "<img src=x onerror=hit=1>", "text": "<script>hit=1</script>"}, 1]},
                {"role": "assistant", "content": "<script>hit=1</script>", "numbers": "<img src=x onerror=hit=1>",
                    "reasoning": "<script>hit=1</script>", "tools": {"__proto__": 1}, "failure": "<b>", "parts": {"root": 1}},
            ]),
            r#"{"__proto__": {"keep": false}, "model": "<script>"}"#,
            2,
        ),
        // Parents that are not there, that come later, or that are the message itself.
        (
            json!([
                {"id": "1", "parent": "1", "role": "user", "content": "a"},
                {"id": "2", "parent": "3", "role": "assistant", "content": "b"},
                {"id": "3", "parent": "__proto__", "role": "user", "content": "c"},
                {"id": "4", "parent": "1", "role": "assistant", "content": "d"},
                {"id": "4", "parent": "1", "role": "assistant", "content": "e"},
            ]),
            "{}",
            2,
        ),
    ] {
        record(messages.clone());
        page.eval(&format!(
            "localStorage.setItem('tinyvllm.settings', {settings:?}); localStorage.setItem('tinyvllm.theme', '<b>'), 0"
        ));
        page.open("about:blank");
        page.open(&format!("{}#{id}", server.url()));
        page.until_ready();
        page.until(&format!("document.querySelectorAll('.message').length === {num_messages}"));
        check(&page, &server, &messages.to_string());
    }
}

#[test]
fn failures_are_reported() {
    let Some(page) = Page::start() else { return };
    let server = Scripted::start("m");
    let loading = |share: f64| {
        Reply::Status(503, "", json!({"status": "loading", "stage": "weights", "progress": share}))
    };
    page.open(&server.url());
    page.until_ready();
    let error = |message: &str| json!({"error": {"message": message}});
    let part = json!({"choices": [{"index": 0, "delta": {"content": "half an **ans"}}]});
    let mut count = 0;
    for (replies, said, content) in [
        (vec![Reply::Status(429, "retry-after: 7\r\n", error("too many"))], "too many Try again in 7 s.", ""),
        (vec![Reply::Status(400, "", error("the prompt is too long"))], "the prompt is too long", ""),
        (vec![Reply::Status(502, "", json!("a proxy"))], "The server answered 502.", ""),
        (
            vec![Reply::Bytes(format!("data: {part}\n\ndata: {}\n\n", error("it failed")))],
            "it failed",
            "half an ans",
        ),
        (vec![Reply::Bytes(format!("data: {part}\n\n"))], "broke off", "half an **ans"),
        (vec![Reply::Bytes("data: {\n\n".to_owned())], "broke off", ""),
        (vec![], "does not answer", ""),
    ] {
        server.will(replies);
        page.write("Hello");
        page.press("Enter");
        count += 2;
        page.until_messages(count);
        let found = page
            .text("[...document.querySelectorAll('.message')].at(-1).querySelector('.failure').textContent");
        assert!(found.contains(said), "{said}: {found}");
        let text =
            page.text("[...document.querySelectorAll('.message')].at(-1).querySelector('.text').textContent");
        assert_eq!(text.replace("**", ""), content.replace("**", ""));
        page.until_ready();
    }
    // A model that is being loaded is waited for, and how far it is is shown.
    server.will([Reply::Status(503, "", error("Loading model")), Reply::text("Here I am.", 3)]);
    server.will_be([loading(0.25), loading(0.5)]);
    page.eval("window.states = new Set(), new MutationObserver(() => states.add(document.querySelector('#state').textContent)) \
        .observe(document.querySelector('#state'), { childList: true }), 0");
    page.click(".message:last-child button[aria-label='Try again: answer']");
    page.until("document.querySelector('#log').textContent.includes('Here I am.')");
    assert_eq!(
        page.eval("['Loading 25 %', 'Loading 50 %', 'Ready'].map((text) => states.has(text))"),
        json!([true, true, true])
    );
    // Questions that had no answer are one turn: templates require alternating turns.
    let events = page.events.borrow();
    let sent = events.iter().filter_map(|event| event["params"]["request"]["postData"].as_str()).next_back();
    let sent: Value = serde_json::from_str(sent.unwrap()).unwrap();
    let roles = sent["messages"].as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap());
    assert_eq!(roles.collect::<Vec<_>>(), ["user", "assistant", "user", "assistant", "user"]);
}

#[test]
fn long_answers_are_no_work_for_the_page() {
    let Some(page) = Page::start() else { return };
    let server = Scripted::start("m");
    page.open(&server.url());
    page.until_ready();
    let texts = [
        "word ".repeat(40_000),
        "x".repeat(200_000),
        "A *paragraph* with `code`.\n\n".repeat(4_000),
        format!("```rust\n{}", "let x = 1; // a line\n".repeat(8_000)),
        "The value $x_1^2$ is \\(\\frac{a}{b}\\).\n\n".repeat(2_000),
        format!("$$\n{}", "{\\frac a {".repeat(10_000)),
        format!("A ${}", "{".repeat(100_000)),
    ];
    for (number, text) in texts.into_iter().enumerate() {
        let before = page.processor_time();
        server.will([Reply::text(&text, 40)]);
        page.write("Go on");
        page.press("Enter");
        page.until_messages(2 * (number + 1));
        let shown = page.text("[...document.querySelectorAll('.assistant .text')].at(-1).textContent");
        assert!(shown.len() > text.len() / 2);
        let seconds = page.processor_time() - before;
        // Building it anew for each of the 5,000 chunks would take minutes.
        assert!(seconds > 0.0 && seconds < 8.0, "{number}: {seconds} s");
    }
}

#[test]
fn reasoning_and_tool_calls_are_shown_apart() {
    let Some(page) = Page::start() else { return };
    let server = Scripted::start("m");
    let call = |text: &str| json!({"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": text}}]});
    let first =
        json!({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "weather", "arguments": ""}}]});
    server.will([Reply::Deltas(vec![
        json!({"role": "assistant", "content": ""}),
        json!({"reasoning_content": "First "}),
        json!({"reasoning_content": "I think."}),
        json!({"content": "Then I **speak**."}),
        first,
        call("{\"city\": "),
        call("\"Oslo\"}"),
    ])]);
    page.open(&server.url());
    page.until_ready();
    page.write("Hello");
    page.press("Enter");
    page.until_messages(2);
    assert_eq!(page.text("document.querySelector('.reasoning div').textContent"), "First I think.");
    // It is folded up once the answer has begun, and opens.
    assert!(!page.eval("document.querySelector('.reasoning').open").as_bool().unwrap());
    page.click(".reasoning summary");
    assert!(page.eval("document.querySelector('.reasoning').open").as_bool().unwrap());
    assert_eq!(page.text("document.querySelector('.markdown strong').textContent"), "speak");
    let tools = page.text("document.querySelector('.assistant > .code pre').textContent");
    let tools: Value = serde_json::from_str(&tools).unwrap();
    assert_eq!(tools, json!([{"name": "weather", "arguments": {"city": "Oslo"}}]));
}
