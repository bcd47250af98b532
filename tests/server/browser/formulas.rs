//! Formulas: TeX as models write it becomes MathML, what cannot be read stays as it was written, and dollars that are
//! money stay money.

use serde_json::{Value, json};

use super::Page;
use super::markdown::page;

/// TeX, and below it the MathML that it becomes.
const FORMULAS: &str = include_str!("formulas.txt");

/// Puts formulas as `⟪TeX⟫` instead of their elements, which [`FORMULAS`] is about. Displayed ones begin with `D `.
const SHORT: &str = "(text, isOpen = false) => {
    const root = whole(text, isOpen);
    for (const math of root.querySelectorAll('math')) {
        const tex = math.querySelector('annotation').textContent;
        math.replaceWith(math.getAttribute('display') === 'block' ? `⟪D ${tex}⟫` : `⟪${tex}⟫`);
    }
    return root.innerHTML.replaceAll(' tabindex=\"0\" role=\"region\" aria-label=\"Formula\"', '');
}";

#[track_caller]
fn check(page: &Page, cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        assert_eq!(page.text(&format!("({SHORT})({})", json!(text))), *expected, "{text}");
    }
}

#[test]
fn formulas_become_mathml() {
    let Some(page) = page() else { return };
    let mut num_formulas = 0;
    for case in FORMULAS.split("\n\n") {
        let (tex, expected) = case.split_once('\n').unwrap();
        let found =
            page.text(&format!("Formula.math({}, false).firstChild.firstChild.innerHTML", json!(tex)));
        let named = found.replace('\u{2061}', "&ApplyFunction;").replace('\u{2009}', "&ThinSpace;");
        assert_eq!(named, expected.trim_end(), "{tex}");
        num_formulas += 1;
    }
    assert!(num_formulas > 100);
    // Around it is the source, for copying and for screen readers.
    assert_eq!(
        page.text("whole('\\\\[ x^2 \\\\]').innerHTML"),
        "<div class=\"formula display\" tabindex=\"0\" role=\"region\" aria-label=\"Formula\"><math display=\"block\"><semantics>\
         <mrow><msup><mi>x</mi><mn>2</mn></msup></mrow><annotation encoding=\"application/x-tex\"> x^2 </annotation></semantics></math></div>"
    );
}

#[test]
fn what_cannot_be_read_is_shown_as_it_was_written() {
    let Some(page) = page() else { return };
    let unreadable = [
        "}",
        "{",
        "x^",
        "x^2^3",
        "\\frac{1}",
        "\\left(x",
        "\\left x\\right)",
        "\\begin{pmatrix} 1",
        "\\end{x}",
        "\\begin{nothing} x \\end{nothing}",
        "\\begin{matrix} x \\end{pmatrix}",
        "\\sqrt[3",
        "\\text{a",
        "\\right)",
        " ",
    ];
    for tex in unreadable {
        assert_eq!(page.eval(&format!("Formula.math({}, false)", json!(tex))), Value::Null, "{tex}");
    }
    // Too long, too many nodes, too deep.
    for code in [
        "'x'.repeat(5001)",
        "'x'.repeat(4500)",
        "'{'.repeat(100) + '}'.repeat(100)",
        "'\\\\sqrt'.repeat(100) + 'x'",
    ] {
        assert_eq!(page.eval(&format!("Formula.math({code}, false)")), Value::Null, "{code}");
    }
    check(
        &page,
        &[
            ("a $\\frac{1$ b", "<p>a <code>$\\frac{1$</code> b</p>"),
            ("a \\(}\\) b", "<p>a <code>\\(}\\)</code> b</p>"),
            ("$$\n}\n\n*a*\n$$", "<div class=\"code\"><pre><code>$$\n}\n\n*a*\n$$</code></pre></div>"),
            ("```math\n{\n```", "<div class=\"code\"><pre><code>{</code></pre></div>"),
        ],
    );
    // A command that is not known is marked, and the rest is a formula.
    let found = page.text("whole('$a + \\\\what{b}$').querySelector('mtext.unknown').textContent");
    assert_eq!(found, "\\what{b}");
}

#[test]
fn formulas_are_distinguished_from_other_texts() {
    let Some(page) = page() else { return };
    check(
        &page,
        &[
            // Money, shells, code.
            ("It costs $5 and $10.", "<p>It costs $5 and $10.</p>"),
            (
                "$5-$10, US$5, ($5) **$5** and **$6**",
                "<p>$5-$10, US$5, ($5) <strong>$5</strong> and <strong>$6</strong></p>",
            ),
            (
                "From $1,000 to 2,000$ a year, or 5$/month and 10$/year",
                "<p>From $1,000 to 2,000$ a year, or 5$/month and 10$/year</p>",
            ),
            (
                "cheap ($$) to dear ($$$), $$ and $$$, $$5 and $$10",
                "<p>cheap ($$) to dear ($$$), $$ and $$$, $$5 and $$10</p>",
            ),
            ("Price: $$\nfood: 4\n\nPrice: $$", "<p>Price: $$<br>food: 4</p><p>Price: $$</p>"),
            ("$HOME and $PATH, $HOME/$USER", "<p>$HOME and $PATH, $HOME/$USER</p>"),
            (
                "`$a` and `b$` cost $5, `x$`",
                "<p><code>$a</code> and <code>b$</code> cost $5, <code>x$</code></p>",
            ),
            (
                "```sh\necho $a$b\n```",
                "<div class=\"code\"><div class=\"code-head\"><span>sh</span><button class=\"quiet\" type=\"button\" data-copy=\"code\">Copy</button></div><pre tabindex=\"0\" role=\"region\" aria-label=\"Code, sh\"><code>echo $a$b</code></pre></div>",
            ),
            ("a \\$x\\$ b \\\\(c\\\\)", "<p>a $x$ b \\(c\\)</p>"),
            ("$ x $, $x $, $ x$", "<p>$ x $, $x $, $ x$</p>"),
            ("$$x and \\(y", "<p>$$x and (y</p>"),
            ("\\[1\\] first\n\\[2\\] second", "<p>[1] first<br>[2] second</p>"),
            ("- \\[ \\] open\n- \\[x\\] done", "<ul><li>[ ] open</li><li>[x] done</li></ul>"),
            // In a text.
            ("the $n$th, $x$, CO$_2$ and 设$x$为", "<p>the ⟪n⟫th, ⟪x⟫, CO⟪_2⟫ and 设⟪x⟫为</p>"),
            ("the numbers $1, 2, 3$ and \\(5\\)", "<p>the numbers ⟪1, 2, 3⟫ and ⟪5⟫</p>"),
            (
                "**$a*b$** _if $x_{1}$ is_ *$a^*$*",
                "<p><strong>⟪a*b⟫</strong> <em>if ⟪x_{1}⟫ is</em> <em>⟪a^*⟫</em></p>",
            ),
            ("a $x +\ny$ b", "<p>a ⟪x +\ny⟫ b</p>"),
            ("# The $x$ axis", "<h3>The ⟪x⟫ axis</h3>"),
            (
                "so $$x$$ and \\[y = 1\\] hold",
                "<p>so <span class=\"formula display\">⟪D x⟫</span> and <span class=\"formula display\">⟪D y = 1⟫</span> hold</p>",
            ),
            (
                "$a+b+c+d+e+f+g+h+i+j+k+l+m$",
                "<p><span class=\"formula\">⟪a+b+c+d+e+f+g+h+i+j+k+l+m⟫</span></p>",
            ),
            ("Let $ x^2 $, $\\frac{1}{2} $, $ a = b $.", "<p>Let ⟪ x^2 ⟫, ⟪\\frac{1}{2} ⟫, ⟪ a = b ⟫.</p>"),
            (
                "$5 * 8 = $x, $FOO_A or $foo_b and $ c, $5 and \\alpha is $",
                "<p>$5 * 8 = $x, $FOO_A or $foo_b and $ c, $5 and \\alpha is $</p>",
            ),
            (
                "we get\\begin{align}a &= b\\end{align} and",
                "<p>we get<span class=\"formula display\">⟪D \\begin{align}a &amp;= b\\end{align}⟫</span> and</p>",
            ),
            (
                "so $$\n- x\n\n# y\n$$ and \\[\n> z\n\\]\nhold",
                "<p>so <span class=\"formula display\">⟪D \n- x\n\n# y\n⟫</span> and <span class=\"formula display\">⟪D \n&gt; z\n⟫</span><br>hold</p>",
            ),
            // Of their own.
            (
                "a\n$$\n- x\n\n# y\n$$\nb",
                "<p>a</p><div class=\"formula display\">⟪D \n- x\n\n# y\n⟫</div><p>b</p>",
            ),
            ("\\[ x \\].", "<div class=\"formula display\">⟪D  x .⟫</div>"),
            (
                "$$\nx\n$$ where $y$ is",
                "<p><span class=\"formula display\">⟪D \nx\n⟫</span> where ⟪y⟫ is</p>",
            ),
            (
                "\\begin{align*}\na &= b\n\\end{align*}",
                "<div class=\"formula display\">⟪D \\begin{align*}\na &amp;= b\n\\end{align*}⟫</div>",
            ),
            ("```math\nx\n```", "<div class=\"formula display\">⟪D x⟫</div>"),
            (
                "- a\n  $$\n  - b\n  $$\n- c",
                "<ul><li>a<div class=\"formula display\">⟪D \n- b\n⟫</div></li><li>c</li></ul>",
            ),
            (
                "1. a\n\\[\nx\n\\]\n2. b",
                "<ol><li>a</li></ol><div class=\"formula display\">⟪D \nx\n⟫</div><ol start=\"2\"><li>b</li></ol>",
            ),
            ("> \\[\n> x\n> \\]", "<blockquote><div class=\"formula display\">⟪D \nx\n⟫</div></blockquote>"),
            // One that does not end where it should is none.
            (
                "$$\nx\n\n\n\n\n\ny\n$$ z $$",
                "<p>$$<br>x</p><p>y</p><div class=\"formula display\">⟪D  z ⟫</div>",
            ),
            (
                "\\[\na\n```\n\\]\n```",
                "<p>[<br>a</p><div class=\"code\"><div class=\"code-head\"><span>text</span><button class=\"quiet\" type=\"button\" data-copy=\"code\">Copy</button></div><pre tabindex=\"0\" role=\"region\" aria-label=\"Code, text\"><code>\\]</code></pre></div>",
            ),
        ],
    );
    let cells = "[...whole('| a | b |\\n|---|---|\\n| $|x|$ | $5 |').querySelectorAll('td')].map((cell) => cell.querySelector('annotation')?.textContent ?? cell.textContent)";
    assert_eq!(page.eval(cells), json!(["|x|", "$5"]));
}

/// A text with formulas everywhere, some of which are none.
const MIXED: &str = "A $x^2$ and $5, **b** \\(a_1\\) and\n$$\n\\frac{a}{b}\n\n+ c\n$$\nthen\n\\[ x \\] tail\n\n1. one\n   \\[\n   \
    \\begin{aligned}\n   a &= b \\\\\n   - c\n   \\end{aligned}\n   \\]\n2. two \\[\n\\[\ny\n\\]\n\n```math\na\n```\n| $|x|$ | b |\n\
    |---|---|\n| \\(a\\) | $b$ |\n\n$$ unclosed\nfoo\n\n\n\n\n\nbar\n\n# H\n\n$$x$$ inline\n\\[1\\] ref\n\\[2\\] ref\n\n\
    \\begin{align}\nx\n\\begin{align}\ny\n\\end{align}\n\n$$\nx\n$$ and more $y$.\n$$\nlast $$\n- x\n$$ and \\[\n# y\n\\]\nmore \\[\n\n\n\n\n\n\n- no\n\\] \
    $ x^2 $\nso \\begin{align}\n- 1\n\\end{align}\n\nand $$ never\n\n```\nclosed\n```\n- $$";

#[test]
fn formulas_come_in_chunks() {
    let Some(page) = page() else { return };
    let found = page.eval(&format!(
        "(() => {{
            const wrong = [];
            for (const text of [{}, 'a\\n$$ b\\nc', '$$\\n' + 'a\\n'.repeat(3000) + '$$\\nend', '- a\\n$$x$$ where\\n- b']) {{
                const expected = whole(text).innerHTML;
                for (const size of text.length > 3000 ? [997] : [1, 2, 3, 7, 20]) {{
                    const found = inPieces(text, size);
                    if (found !== expected) wrong.push([size, found, expected]);
                }}
            }}
            return wrong;
        }})()",
        json!(MIXED)
    ));
    assert_eq!(found, json!([]));
    // What has begun is shown as far as it goes. What a dollar begins is as it was written until it ends.
    let inner = |text: &str| {
        let nodes = "[...whole(TEXT, true).querySelectorAll('semantics > mrow')].map((row) => row.innerHTML).join('')";
        page.text(&nodes.replace("TEXT", &json!(text).to_string()))
    };
    for (text, expected) in [
        ("$$\n\\frac{a}{b", "<mfrac><mi>a</mi><mi>b</mi></mfrac>"),
        ("$$\n\\frac{a}{b}\n$", "<mfrac><mi>a</mi><mi>b</mi></mfrac>"),
        ("so \\(x^", "<msup><mi>x</mi><mrow></mrow></msup>"),
        ("so \\(x \\al", "<mi>x</mi>"),
        ("\\[\nx\n\\", "<mi>x</mi>"),
        ("\\[ \\begin{pma", ""),
        (
            "\\begin{align}\na",
            "<mtable class=\"aligned\" displaystyle=\"true\"><mtr><mtd><mi>a</mi></mtd></mtr></mtable>",
        ),
    ] {
        assert_eq!(inner(text), expected, "{text}");
    }
    for (text, expected) in [
        ("**so** $a*b_1 *c", "<p><strong>so</strong> $a*b_1 *c</p>"),
        ("costs $5 and *c", "<p>costs $5 and <em>c</em></p>"),
    ] {
        assert_eq!(page.text(&format!("whole({}, true).innerHTML", json!(text))), expected, "{text}");
    }
}

#[test]
fn no_formula_takes_long() {
    let Some(page) = page() else { return };
    let units = [
        "$",
        "$a",
        "$a$",
        "$$",
        "$$a",
        "$$\n",
        "$$\na\n",
        "\\(",
        "\\(a",
        "\\(a\\)",
        "\\)",
        "\\[",
        "\\[\n",
        "\\[\na\n",
        "\\[ x \\] y\n",
        "\\begin{align}\n",
        "\\begin{align}",
        "\\frac",
        "\\frac{",
        "\\sqrt",
        "{",
        "}",
        "^",
        "_",
        "x^",
        "\\left(",
        "\\text{",
        "\\text{$",
        "&",
        "\\\\",
        "\\begin{matrix}",
        "\\def\\a{\\a\\a}",
        "*$a*",
        "$a* ",
        "[$a$",
        "|$a|",
        "$`",
        "> $$\n",
        "- $$\n",
        "```math\n",
        "1,000,",
        "\\displaystyle",
        "a\\over b",
        "\\unknown{",
        "\\hspace{",
        "'",
    ];
    for unit in units {
        for begin in ["", "$$\n", "| a | b |\n|---|---|\n"] {
            let (begin, unit) = (json!(begin), json!(unit));
            let before = page.processor_time();
            page.eval(&format!(
                "(() => {{
                    const text = {begin} + {unit}.repeat(50000 / {unit}.length);
                    whole(text, true);
                    whole(text, false);
                    Formula.math(text.slice(0, 5000), true, true);
                }})()"
            ));
            let seconds = page.processor_time() - before;
            assert!(seconds < 5.0, "{begin} and {unit} again and again: {seconds} s");
        }
    }
}

/// What is nested as deep as it may be, and what is as wide: laying them out is the browser's work, and takes no
/// longer than reading them.
#[test]
fn no_layout_takes_long() {
    let Some(page) = page() else { return };
    for (opening, closing) in [
        ("\\left(\\frac{1}{", "}\\right)"),
        ("\\begin{pmatrix} 1 & ", "\\end{pmatrix}"),
        ("\\left(\\underbrace{", "}_{a}\\right)"),
        ("x^{", "}"),
        ("\\boxed{\\sqrt{", "}}"),
        ("\\left(x\\right)", ""),
        ("a & b \\\\", ""),
    ] {
        let before = page.processor_time();
        let depth = page.eval(&format!(
            "(() => {{
                const nested = (depth) => {}.repeat(depth) + 'x' + {}.repeat(depth);
                for (let depth = 400; ; depth -= 1) {{
                    const math = Formula.math(nested(depth), true);
                    if (!math) continue;
                    document.querySelector('#log').replaceChildren(math);
                    math.getBoundingClientRect();
                    return depth;
                }}
            }})()",
            json!(opening),
            json!(closing)
        ));
        assert!(depth.as_u64().unwrap() >= 10, "{opening}: {depth}");
        let seconds = page.processor_time() - before;
        assert!(seconds < 5.0, "{opening}: {seconds} s");
    }
}

#[test]
fn formulas_are_laid_out_and_can_be_reached() {
    let Some(page) = page() else { return };
    page.resize(360, 700);
    let wide = "a+b+c+d+e+f+g+h+i+j+k+l+m+n+o+p+q+r+s+t+u+v+w+x+y+z";
    page.eval(&format!(
        "(() => {{
            const root = whole({});
            root.className = 'markdown';
            document.querySelector('#log').append(root);
        }})()",
        json!(format!("In a text ${wide}$ and\n\n$$\n{wide}\n$$\n\n$$\\sum_{{i=1}}^n \\frac{{a}}{{b}}$$\n\n$\\sum_{{i=1}}^n \\frac{{a}}{{b}}$"))
    ));
    let measured = page.eval(
        "(() => {
            const [inText, displayed, small] = document.querySelectorAll('#log .formula');
            const narrow = document.querySelector('#log p:last-child > math');
            const box = (node) => node.getBoundingClientRect();
            return [
                [inText, displayed].every((node) => node.scrollWidth > node.clientWidth && box(node).right <= innerWidth),
                document.querySelector('#scroller').scrollWidth <= innerWidth,
                small.scrollWidth <= small.clientWidth && box(small).height > box(narrow).height,
                getComputedStyle(displayed.firstChild).color === getComputedStyle(document.body).color,
                [...document.querySelectorAll('#log annotation')].every((node) => box(node).height === 0),
            ];
        })()",
    );
    assert_eq!(measured, json!([true, true, true, true, true]));
    let tree = page.call("Accessibility.getFullAXTree", &json!({}));
    let nodes = tree["nodes"].as_array().unwrap();
    let count = |role: &str| nodes.iter().filter(|node| node["role"]["value"] == role).count();
    assert_eq!(count("MathMLMath"), 4);
    let is_region = |node: &&Value| node["role"]["value"] == "region" && node["name"]["value"] == "Formula";
    assert_eq!(nodes.iter().filter(is_region).count(), 3);
}
