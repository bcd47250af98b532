//! What the page looks like: width, contrast, names.

use serde_json::{Value, json};

use super::Page;
use super::scripted::{Reply, Scripted};

const RICH: &str = "# A heading\n\nText with `code`, [a link](https://a.example), **strong** words and \
    averyveryverylongwordthatdoesnotendaveryveryverylongwordthatdoesnotendaveryveryverylongword.\n\n> quoted\n\n\
    | a column | another column | a third column | a fourth column |\n|---|---|---|---|\n| a cell | a cell | a cell | a cell |\n\n\
    ```rust\n// A comment that is longer than any narrow screen, so that the block has to scroll inside.\nfn main() { let x = \"text\" + 1; }\n```\n\n\
    - one\n- two";

/// A page with everything on it: texts of all kinds, a failure, numbers.
fn rich() -> Option<(Page, Scripted)> {
    let page = Page::start()?;
    let server = Scripted::start("a-model-with-a-rather-long-name-that-nobody-would-type-Q4_K_M");
    let mut reply = Reply::text(RICH, 20);
    if let Reply::Deltas(deltas) = &mut reply {
        deltas.insert(0, json!({"reasoning_content": "Some reasoning."}));
        deltas.push(json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}));
    }
    server.will([reply, Reply::Status(400, "", json!({"error": {"message": "something was wrong"}}))]);
    page.open(&server.url());
    page.until_ready();
    for count in [2, 4] {
        page.write("A question with averyveryverylongwordthatdoesnotendaveryveryverylongwordthatdoesnotend");
        page.press("Enter");
        page.until_messages(count);
    }
    page.eval("document.querySelector('.reasoning').open = true");
    Some((page, server))
}

/// What can be opened alongside or above the conversation; first nothing.
const PARTS: [&str; 6] = ["", "#settings", "#key-dialog", "#shortcuts", "#panel", "#sidebar"];

impl Page {
    pub(super) fn show_part(&self, part: &str, is_shown: bool) {
        let action = match (part, is_shown) {
            ("", _) => return,
            ("#sidebar", _) => format!("document.querySelector('{part}').hidden = {}", !is_shown),
            (_, true) => format!("document.querySelector('{part}').showModal()"),
            (_, false) => format!("document.querySelector('{part}').close()"),
        };
        self.eval(&action);
    }
}

#[test]
fn narrow_screens_scroll_in_one_direction() {
    let Some((page, _server)) = rich() else { return };
    for width in [360, 320, 500, 1_600] {
        page.resize(width, 640);
        for part in PARTS {
            page.show_part(part, true);
            let wide = page.eval(
                "[document.documentElement, document.body, document.querySelector('main'), ...document.querySelectorAll('dialog[open]')] \
                 .filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.nodeName)",
            );
            assert_eq!(wide, json!([]), "{width} {part}");
            // And nothing sticks out that can not be scrolled to.
            let out = page.eval(
                "[...document.querySelectorAll('header *, footer *, .message, dialog[open] *, #sidebar:not([hidden]) *')].filter((node) => { \
                     const box = node.getBoundingClientRect(); \
                     return box.width > 1 && getComputedStyle(node).visibility === 'visible' && (box.left < -1 || box.right > innerWidth + 1); \
                 }).map((node) => node.outerHTML)",
            );
            assert_eq!(out, json!([]), "{width} {part}");
            page.show_part(part, false);
        }
        // The field and the button are in sight.
        page.click("#input");
    }
}

/// The texts whose contrast with their background is below 4.5.
const FAINT: &str = "(() => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const parse = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return { rgb: [r, g, b], alpha: a / 255 };
    };
    const over = (top, below) => top.rgb.map((value, index) => value * top.alpha + below[index] * (1 - top.alpha));
    const behind = (node) => {
        if (!node) return [255, 255, 255];
        const colour = parse(getComputedStyle(node).backgroundColor);
        return colour.alpha === 1 ? colour.rgb : over(colour, behind(node.nodeName === 'DIALOG' ? null : node.parentElement));
    };
    const light = (rgb) => {
        const [r, g, b] = rgb.map((value) => value / 255).map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    let count = 0;
    const look = (node, style, what) => {
        const below = behind(node);
        const value = contrast(over(parse(style.color), below), below);
        count += 1;
        if (value < 4.5) found.push([what, value, style.color]);
    };
    while (texts.nextNode()) {
        const node = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || !node.checkVisibility() || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(node.nodeName)) continue;
        if (node.closest(':disabled')) continue;
        look(node, getComputedStyle(node), texts.currentNode.data);
    }
    for (const node of document.querySelectorAll('input, textarea')) look(node, getComputedStyle(node, '::placeholder'), node.id);
    return { found, count };
})()";

#[test]
fn texts_can_be_read_in_light_and_dark() {
    let Some((page, _server)) = rich() else { return };
    let background = "getComputedStyle(document.body).backgroundColor";
    let mut backgrounds = Vec::new();
    for scheme in ["light", "dark"] {
        page.prefer(scheme);
        backgrounds.push(page.text(background));
        for part in PARTS {
            page.show_part(part, true);
            let found = page.eval(FAINT);
            assert_eq!(found["found"], json!([]), "{scheme}");
            assert!(found["count"].as_u64().unwrap() > 50, "{found}");
            page.show_part(part, false);
        }
    }
    assert_ne!(backgrounds[0], backgrounds[1]);
    // The button overrules the system, and is remembered.
    page.click("#theme");
    assert_eq!(page.text(background), backgrounds[0]);
    page.call("Page.reload", &json!({}));
    page.until(&format!("{background} === '{}' && document.readyState === 'complete'", backgrounds[0]));
    page.click("#theme");
    assert_eq!(page.text(background), backgrounds[1]);
}

#[test]
fn code_is_copied_as_it_is_and_reduced_motion_is_respected() {
    let Some((page, server)) = rich() else { return };
    let rights =
        json!({"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": server.url()});
    page.call("Browser.grantPermissions", &rights);
    page.click(".markdown .code-head button");
    page.until("document.querySelector('#news').textContent === 'Copied.'");
    let code = page.text("navigator.clipboard.readText()");
    assert!(RICH.contains(&format!("```rust\n{code}\n```")), "{code}");
    page.eval("document.querySelector('#news').textContent = ''");
    page.click(".assistant .tools button");
    page.until("document.querySelector('#news').textContent === 'Copied.'");
    assert_eq!(page.text("navigator.clipboard.readText()"), RICH);

    page.eval("document.querySelector('#state').dataset.kind = 'wait'");
    let animation = "getComputedStyle(document.querySelector('#state'), '::before').animationName";
    assert_eq!(page.text(animation), "pulse");
    let feature = json!([{"name": "prefers-reduced-motion", "value": "reduce"}]);
    page.call("Emulation.setEmulatedMedia", &json!({"features": feature}));
    assert_eq!(page.text(animation), "none");
}

#[test]
fn everything_has_a_name_for_screen_readers() {
    let Some((page, _server)) = rich() else { return };
    let roles = [
        "button",
        "textbox",
        "combobox",
        "checkbox",
        "spinbutton",
        "link",
        "dialog",
        "region",
        "log",
        "article",
        "heading",
        "DisclosureTriangle",
        "searchbox",
        "complementary",
        "MenuListPopup",
        "option",
    ];
    let mut seen = std::collections::BTreeSet::new();
    for part in PARTS {
        page.show_part(part, true);
        let tree = page.call("Accessibility.getFullAXTree", &json!({}));
        for node in tree["nodes"].as_array().unwrap() {
            let role = node["role"]["value"].as_str().unwrap_or_default();
            if node["ignored"] == true || !roles.contains(&role) || role == "MenuListPopup" {
                continue;
            }
            seen.insert(role.to_owned());
            let name = node["name"]["value"].as_str().unwrap_or_default();
            assert!(!name.trim().is_empty(), "a {role} has no name: {node}");
        }
        page.show_part(part, false);
    }
    for role in [
        "button",
        "textbox",
        "checkbox",
        "spinbutton",
        "link",
        "dialog",
        "region",
        "log",
        "heading",
        "searchbox",
        "complementary",
    ] {
        assert!(seen.contains(role), "{role} is not among {seen:?}");
    }
    // Changes of state are announced.
    let live: Value = page.eval(
        "['#news', '#state', '.failure'].map((each) => document.querySelector(each).getAttribute('role'))",
    );
    assert_eq!(live, json!(["status", "status", "alert"]));
}
