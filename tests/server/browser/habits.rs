//! What people are used to from elsewhere: their files, keys, fingers, names of conversations.

use serde_json::{Value, json};

use super::scripted::{Reply, start};

const NAMES: &str = "[...document.querySelectorAll('#conversations .name')].map((each) => each.textContent)";
const TEXTS: &str = "[...document.querySelectorAll('.message .text')].map((each) => each.textContent)";

/// As ChatGPT exports it: a tree with a root that is no message, a hidden one, a tool's, and two answers.
fn chatgpt() -> Value {
    let node = |parent: Value, role: &str, text: &str| {
        json!({"parent": parent, "message": {"author": {"role": role}, "recipient": "all",
            "content": {"content_type": "text", "parts": [text]}, "metadata": {}}})
    };
    let mut hidden = node(json!("root"), "user", "secret");
    hidden["message"]["metadata"] = json!({"is_visually_hidden_from_conversation": true});
    json!([{"title": "Sea", "update_time": 1_700_000_000.5, "current_node": "4", "conversation_id": "0123abcd-0123-4567-89ab-0123456789ab",
    "mapping": {
        "4": node(json!("tool"), "assistant", "By the coast."),
        "root": {"parent": null, "message": null},
        "1": hidden,
        "2": node(json!("1"), "user", "Where?"),
        "3": node(json!("2"), "assistant", "Nowhere."),
        "tool": node(json!("2"), "tool", "results"),
    }}])
}

/// As Open WebUI exports it.
fn open_webui() -> Value {
    let message = |id: &str, parent: Value, role: &str, content: &str| json!({"id": id, "parentId": parent, "childrenIds": [], "role": role, "content": content});
    json!([{"id": "a9d1abcd-0123-4567-89ab-0123456789ab", "title": "Land", "updated_at": 1_700_000_001, "chat": {"title": "Land", "system": "Be kind.",
        "history": {"currentId": "y", "messages": {
            "x": message("x", Value::Null, "user", "Who?"), "y": message("y", json!("x"), "assistant", "You.")}}}}])
}

#[test]
fn exports_of_other_programs_are_read_and_opened() {
    let Some((page, _server)) = start(&[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let import = |name: &str, value: &Value| {
        let path = folder.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        page.eval("document.querySelector('#toast').hidden = true");
        page.choose_files("#import-file", &[&path]);
        page.until("!document.querySelector('#toast').hidden");
        page.text("document.querySelector('#toast').textContent")
    };
    assert_eq!(import("conversations.json", &chatgpt()), "1 conversation is new.");
    assert_eq!(page.eval(TEXTS), json!(["Where?", "By the coast."]));
    assert_eq!(page.text("document.title"), "Sea · tinyvllm");
    assert_eq!(page.text("document.querySelector('.versions').textContent"), "‹2 / 2›");
    assert_eq!(import("chats.json", &open_webui()), "1 conversation is new.");
    assert_eq!(page.eval(TEXTS), json!(["Who?", "You."]));
    assert_eq!(page.text("document.querySelector('#system-line').textContent"), "Be kind.");
    assert_eq!(page.eval(NAMES), json!(["Land", "Sea"]));
    // The same file again is nothing new.
    assert_eq!(import("again.json", &chatgpt()), "0 conversations are new.");
    // Trees that are none.
    for mapping in
        [json!({}), json!({"a": {"parent": "b"}, "b": {"parent": "a"}}), json!({"a": 1, "b": null})]
    {
        let found = import("odd.json", &json!([{"mapping": mapping, "current_node": "a"}]));
        assert!(found.contains("has no messages"), "{found}");
    }
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn the_model_names_conversations() {
    let Some((page, server)) = start(&["By the sea.", "Yes.", "No."]) else { return };
    let ask = |text: &str| {
        page.eval("document.querySelector('#input').focus()");
        page.write(text);
        page.press("Enter");
        page.until_messages(2);
    };
    server.will_name("\"Lighthouses of the North.\"");
    ask("Where do they stand?");
    page.until(&format!("({NAMES})[0] === 'Lighthouses of the North'"));
    page.until("document.title === 'Lighthouses of the North · tinyvllm'");
    // What is no name is not taken.
    page.click("#new-chat");
    server.will_name(&"A sentence that goes on ".repeat(5));
    ask("Is it?");
    page.until_kept(2);
    // And no permission is requested if that is off.
    page.click("#open-settings");
    page.click("#names");
    page.press("Escape");
    page.click("#new-chat");
    server.will_name("Never");
    ask("Or not?");
    page.until_kept(2);
    assert_eq!(page.eval(NAMES), json!(["Or not?", "Is it?", "Lighthouses of the North"]));
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn a_conversation_that_is_answered_elsewhere_is_marked() {
    let Some((page, server)) = start(&[]) else { return };
    server.will([Reply::Held(vec![json!({"content": "Half"})], Vec::new())]);
    page.write("a");
    page.press("Enter");
    page.until(&format!("({TEXTS})[1] === 'Half'"));
    page.click("#new-chat");
    let marked = "[...document.querySelectorAll('#conversations .name')].map((each) => each.textContent.includes('being given') && each.classList.contains('growing'))";
    assert_eq!(page.eval(marked), json!([true]));
    server.release();
    page.until(&format!("({marked})[0] === false"));
}

#[test]
fn keys_do_what_is_done_often() {
    let Some((page, _server)) = start(&["one", "two"]) else { return };
    page.write("a question");
    page.press("Enter");
    page.until_messages(2);
    page.press("Ctrl+k");
    assert_eq!(page.text("document.activeElement.id"), "search");
    // A question mark is a character where one writes.
    page.press("?");
    assert_eq!(page.text("document.querySelector('#search').value"), "?");
    page.press("Ctrl+Shift+s");
    page.until("!document.querySelector('#sidebar').checkVisibility()");
    page.press("Ctrl+Shift+s");
    page.until("document.querySelector('#sidebar').checkVisibility()");
    page.press("Ctrl+Shift+o");
    page.until("!document.querySelector('.message') && document.activeElement.id === 'input'");
    page.eval("history.back()");
    page.until_messages(2);
    // The last message, from an empty field.
    page.eval("document.querySelector('#input').focus()");
    page.press("ArrowUp");
    assert_eq!(page.text("document.activeElement.ariaLabel"), "Edit message");
    page.eval("document.activeElement.select()");
    page.write("another question");
    page.press("Enter");
    page.until(&format!("({TEXTS})[1] === 'two'"));
    page.eval("document.activeElement.blur()");
    page.press("?");
    page.until("document.querySelector('#shortcuts').open");
    let shown = page.text("document.querySelector('#keys-list').textContent");
    for text in ["Ctrl + K", "Search conversations", "Edit the last message", "Ctrl + Shift + O"] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    page.press("Escape");
    page.until("!document.querySelector('#shortcuts').open");
    page.press("Ctrl+/");
    page.until("document.querySelector('#shortcuts').open");
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn touch_targets_are_large_and_there_is_a_send_button() {
    let Some((page, _server)) = start(&["one"]) else { return };
    page.call("Emulation.setTouchEmulationEnabled", &json!({"enabled": true}));
    let size = json!({"width": 390, "height": 760, "deviceScaleFactor": 1, "mobile": true});
    page.call("Emulation.setDeviceMetricsOverride", &size);
    page.until("matchMedia('(pointer: coarse)').matches");
    page.write("a");
    page.press("Enter");
    page.write("b");
    assert_eq!(page.text("document.querySelector('#input').value"), "a\nb");
    page.click("#send");
    page.until_messages(2);
    assert_eq!(page.text("document.querySelector('.user .text').textContent"), "a\nb");
    for part in ["", "#settings", "#key-dialog", "#shortcuts", "#panel", "#sidebar"] {
        page.show_part(part, true);
        let small = page.eval(
            "[...document.querySelectorAll('button, select, summary, textarea, input:not([type=checkbox])')].filter((node) => {
                const box = node.getBoundingClientRect();
                return node.checkVisibility() && box.width > 1 && (box.height < 44 || box.width < 44);
            }).map((node) => node.outerHTML)",
        );
        assert_eq!(small, json!([]), "{part}");
        page.show_part(part, false);
    }
}

#[test]
fn the_page_fits_at_twice_the_text_size() {
    let Some((page, _server)) = start(&["one"]) else { return };
    page.write("a");
    page.press("Enter");
    page.until_messages(2);
    // 1,280 by 720, at 200 %; and on the largest step, 400 %.
    for (width, height, least) in [(640, 360, 200.0), (320, 256, 120.0)] {
        page.resize(width, height);
        page.eval("document.querySelector('#toast').hidden = true");
        page.eval(super::FRAME);
        let shown = page.eval("document.querySelector('main').clientHeight").as_f64().unwrap();
        assert!(shown >= least, "{shown} of {height}");
        page.click("#input");
        page.click("#open-settings");
        page.until("document.querySelector('#settings').open");
        page.click("#delete-all");
        page.until("!document.querySelector('#settings').open");
    }
}
