//! What texts become on the page, that it does not depend on the chunks in which they come, and how long it takes.

use serde_json::json;

use super::Page;
use super::scripted::Scripted;

/// Opens the page for its script alone.
pub(super) fn page() -> Option<Page> {
    let page = Page::start()?;
    page.open(&Scripted::start("m").url());
    page.until_ready();
    page.eval(
        "window.whole = (text, isOpen = false) => {
            const root = document.createElement('div');
            new Markdown.View(root).render(text, isOpen);
            return root;
        };
        window.inPieces = (text, size) => {
            const root = document.createElement('div');
            const view = new Markdown.View(root);
            for (let end = size; end < text.length; end += size) view.render(text.slice(0, end), true);
            view.render(text, false);
            return root.innerHTML;
        }, 0",
    );
    Some(page)
}

#[test]
fn texts_become_nodes() {
    let Some(page) = page() else { return };
    let link = |address: &str, text: &str| {
        format!(
            "<a href=\"{address}\" title=\"{address}\" target=\"_blank\" rel=\"noopener noreferrer nofollow\">{text}</a>"
        )
    };
    let cases = [
        ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>".to_owned()),
        ("# A #\n###### B\n#no", "<h3>A</h3><h6>B</h6><p>#no</p>".to_owned()),
        ("**a** *b* ***c*** ~~d~~ __e__ _f_", "<p><strong>a</strong> <em>b</em> <strong><em>c</em></strong> <del>d</del> <strong>e</strong> <em>f</em></p>".to_owned()),
        ("2 * 3 * 4 snake_case_name **", "<p>2 * 3 * 4 snake_case_name **</p>".to_owned()),
        ("*a **b** c*", "<p><em>a <strong>b</strong> c</em></p>".to_owned()),
        ("`a*b*` ``c`d`` \\*e\\*", "<p><code>a*b*</code> <code>c`d</code> *e*</p>".to_owned()),
        ("- a\n- b\n  - c\n\n    d\n- e", "<ul><li>a</li><li>b<ul><li><p>c</p><p>d</p></li></ul></li><li>e</li></ul>".to_owned()),
        ("3. a\n4. b", "<ol start=\"3\"><li>a</li><li>b</li></ol>".to_owned()),
        ("- [ ] a\n- [x] b", "<ul><li>☐ a</li><li>☑ b</li></ul>".to_owned()),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>".to_owned()),
        ("a\n\n---\n* * *", "<p>a</p><hr><hr>".to_owned()),
        ("AT&amp;T &lt;b&gt; &copy;", "<p>AT&amp;T &lt;b&gt; &amp;copy;</p>".to_owned()),
        ("[a b](https://a.example/x_(y) \"t\")", format!("<p>{}</p>", link("https://a.example/x_(y)", "a b"))),
        ("see https://a.example/b, or (https://a.example/c).", format!("<p>see {}, or ({}).</p>", link("https://a.example/b", "https://a.example/b"), link("https://a.example/c", "https://a.example/c"))),
        ("<mailto:me@a.example> [a] [b](c)", format!("<p>{} [a] [b](c)</p>", link("mailto:me@a.example", "mailto:me@a.example"))),
        ("a[^1] [^2](b) [^x] [^4]: c\n[^1]: The *note*\nof it\n[^22]: d", "<p>a<sup><button class=\"quiet\" type=\"button\" data-note-of=\"1\" aria-label=\"Footnote 1\">1</button></sup> [^2](b) [^x] [^4]: c</p><p class=\"note\" data-note=\"1\" tabindex=\"-1\"><sup>1</sup> The <em>note</em><br>of it</p><p class=\"note\" data-note=\"22\" tabindex=\"-1\"><sup>22</sup> d</p>".to_owned()),
        ("![a](https://a.example/i.png)", format!("<p>{}</p>", link("https://a.example/i.png", "Image: a"))),
    ];
    for (text, expected) in cases {
        let found = page.text(&format!("whole({}).innerHTML", json!(text)));
        // In this order the browser writes the attributes.
        assert_eq!(found, expected, "{text}");
    }
    let code = "```rust\nfn main() { let x = \"a\"; } // b\n```";
    let found = page.text(&format!("whole({}).querySelector('code').innerHTML", json!(code)));
    let expected = "<span class=\"tok-keyword\">fn</span> main() { <span class=\"tok-keyword\">let</span> x = \
        <span class=\"tok-string\">\"a\"</span>; } <span class=\"tok-comment\">// b</span>";
    assert_eq!(found, expected);
    let table = "a|b\n:-:|--:\n1|`x`\n2 \\| 3|";
    let cells =
        "[...whole(TABLE).querySelectorAll('th, td')].map((cell) => cell.textContent + cell.style.textAlign)";
    let found = page.eval(&cells.replace("TABLE", &json!(table).to_string()));
    assert_eq!(found, json!(["acenter", "bend", "1center", "xend", "2 | 3center", "end"]));
}

/// A text with everything in it.
const LONG: &str = "# A heading\n\nSome *words*, **more\nof them** and `code`.\nNext line\n1.5 goes on\n#so does this\n- one\n- two\n  1. deep\n  2. deeper\n\n     \
    still\n- three\n\n1.5 is no item\n\n| a | b |\n|---|:-:|\n| 1 | **2** |\n| 3 | [l](https://a.example) |\nend\n\n\
    ```python\ndef f():\n    return '```'\n```\n> quoted\n> - item\n>   more\n\n***\n~~~\nopen *fence*\n\n# not a heading\n~~~\n\
    last [link](https://a.example/x) https://b.example/y. Done\n\n```js\nlet a = 1;";

#[test]
fn chunks_make_no_difference() {
    let Some(page) = page() else { return };
    let found = page.eval(&format!(
        "(() => {{
            const text = {};
            const expected = whole(text).innerHTML;
            const wrong = [];
            for (const size of [1, 2, 3, 5, 8, 13, 40, 200]) {{
                const found = inPieces(text, size);
                if (found !== expected) wrong.push([size, found, expected]);
            }}
            return wrong;
        }})()",
        json!(LONG)
    ));
    assert_eq!(found, json!([]));
    // What was begun is shown as if it were complete, so that nothing jumps when it is.
    for (text, expected) in [
        ("a **b", "<p>a <strong>b</strong></p>"),
        ("a **b*", "<p>a <strong>b</strong></p>"),
        ("a **", "<p>a </p>"),
        ("a `b", "<p>a <code>b</code></p>"),
        ("a [b](http", "<p>a b</p>"),
        (
            "| a | b",
            "<div class=\"table\" tabindex=\"0\" role=\"region\" aria-label=\"Table\"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody></tbody></table></div>",
        ),
    ] {
        assert_eq!(page.text(&format!("whole({}, true).innerHTML", json!(text))), expected, "{text}");
    }
    // A finished block is never built again.
    let same = page.eval(
        "(() => {
            const view = new Markdown.View(document.createElement('div'));
            view.render('first\\n\\nsecond\\n\\nthi', true);
            const [first] = view.root.children;
            view.render('first\\n\\nsecond\\n\\nthird\\n\\nfourth', true);
            const second = view.root.children[1];
            view.render('first\\n\\nsecond\\n\\nthird\\n\\nfourth\\n\\nfifth', true);
            return first === view.root.children[0] && second === view.root.children[1] && view.root.children.length === 5;
        })()",
    );
    assert_eq!(same, json!(true));
}

/// What texts are made of, formulas too.
const FRAGMENTS: &[&str] = &[
    "x",
    "a b",
    "word two",
    ".",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\n  ",
    "- ",
    "\n- ",
    "1. ",
    "> ",
    "\n> ",
    "# ",
    "\n# h\n",
    "*",
    "**",
    "`",
    "```",
    "\n```\n",
    "```math\n",
    "|",
    "| a |",
    "\n|---|\n",
    "$",
    "$x$",
    "$5",
    "$$",
    "$$$",
    "$$\n",
    "\n$$\n",
    "\\[",
    "\\[\n",
    "\n\\]",
    "\\]",
    "\\[1\\]",
    "\\(",
    "\\)",
    "\\",
    "=",
    "\\frac{a}{b}",
    "^2",
    "_1",
    "\\begin{align}",
    "[^1]",
    "\n[^1]: ",
    "\n\\end{align}\n",
];

#[test]
fn pieces_of_random_texts_make_no_difference() {
    let Some(page) = page() else { return };
    let found = page.eval(&format!(
        "(() => {{
            const fragments = {};
            let state = 1;
            const random = (limit) => ((state = (Math.imul(state, 1103515245) + 12345) >>> 0) >>> 16) % limit;
            for (let number = 0; number < 1000; number += 1) {{
                const text = Array.from({{ length: 3 + random(28) }}, () => fragments[random(fragments.length)]).join('');
                const expected = whole(text).innerHTML;
                const size = 1 + random(3);
                const root = document.createElement('div');
                const view = new Markdown.View(root);
                for (let end = size; end < text.length; end += size) view.render(text.slice(0, end), true);
                view.render(text, false);
                if (root.innerHTML !== expected) return [text, size, root.innerHTML, expected];
            }}
            return null;
        }})()",
        json!(FRAGMENTS)
    ));
    assert_eq!(found, json!(null));
}

#[test]
fn no_text_takes_long() {
    let Some(page) = page() else { return };
    let units = [
        "a",
        "*",
        "_a",
        "**a",
        "**a ",
        "*a **b ",
        "`",
        "`a``b",
        "[",
        "[a](",
        "[a](b",
        "[a](()",
        "[a](b)",
        "[[a](",
        "![[",
        "]",
        "(",
        "<",
        "<a",
        "&",
        "\\",
        "~~",
        "~~a ",
        "|",
        "|a",
        "- ",
        "> ",
        "#",
        "# ",
        "1. ",
        " ",
        "\n",
        "- a\n",
        "> a\n",
        "|a|b|\n",
        "```\n",
        "```a\n",
        "    - a\n",
        "https://a",
        "https://a.b ",
        "\u{202e}",
        "<script>",
        "-",
        "- -",
        "\t",
        "\"",
        "/*",
        "*a_b",
    ];
    for unit in units {
        for begin in ["", "| a | b |\n|---|---|\n", "```rust\n", "x "] {
            let (begin, unit) = (json!(begin), json!(unit));
            let before = page.processor_time();
            page.eval(&format!(
                "(() => {{
                    const text = {begin} + {unit}.repeat(200000 / {unit}.length);
                    whole(text, true);
                    whole(text, false);
                }})()"
            ));
            let seconds = page.processor_time() - before;
            assert!(seconds < 5.0, "{begin} and {unit} again and again: {seconds} s");
        }
    }
}
