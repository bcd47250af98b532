//! Turns of a conversation: the system prompt, the progress of the prompt, and answers that are changed.

use serde_json::json;

use super::super::client::Server;
use super::Page;
use super::scripted::{Reply, start};

const TEXTS: &str = "[...document.querySelectorAll('.message .text')].map((each) => each.textContent)";
const SYSTEM: &str = "document.querySelector('#system-line').textContent";

/// Writes a message and waits until there are this many.
fn ask(page: &Page, text: &str, count: usize) {
    page.eval("document.querySelector('#input').focus()");
    page.write(text);
    page.press("Enter");
    page.until_messages(count);
    page.until_kept(count);
}

#[test]
fn a_system_prompt_belongs_to_its_conversation() {
    let Some((page, _server)) = start(&["one", "two", "three", "four"]) else { return };
    assert_eq!(page.text(SYSTEM), "none");
    page.click("#open-settings");
    page.eval("document.querySelector('#system').focus()");
    page.write("Be brief.\nAlways.");
    page.press("Escape");
    // It is seen before anything is sent.
    assert_eq!(page.text(SYSTEM), "Be brief.");
    ask(&page, "a", 2);
    let system = |index: usize| page.sent()[index]["messages"][0].clone();
    assert_eq!(system(0), json!({"role": "system", "content": "Be brief.\nAlways."}));
    // Another one for new conversations changes nothing here; and what is changed here, nothing there.
    page.eval("Settings.values.system = 'Rhyme.'");
    page.click("#instructions summary");
    page.eval("document.querySelector('#own-system').select()");
    page.write("Be long.");
    ask(&page, "b", 4);
    assert_eq!(system(1)["content"], "Be long.");
    page.click("#new-chat");
    assert_eq!(page.text(SYSTEM), "Rhyme.");
    ask(&page, "c", 2);
    assert_eq!(system(2)["content"], "Rhyme.");
    page.click("#conversations li:nth-child(2) .name");
    assert_eq!(page.text(SYSTEM), "Be long.");
    page.reload();
    page.until_ready();
    page.until_messages(4);
    assert_eq!(page.text(SYSTEM), "Be long.");
    // None is none.
    page.eval("document.querySelector('#instructions').open = true");
    page.eval("document.querySelector('#own-system').select()");
    page.press("Backspace");
    assert_eq!(page.text(SYSTEM), "none");
    ask(&page, "d", 6);
    assert_eq!(system(3)["role"], "user");
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn answers_are_edited_and_gone_on_with() {
    let Some((page, server)) = start(&["The sky is green."]) else { return };
    ask(&page, "Why?", 2);
    page.click("button[aria-label='Edit answer']");
    assert_eq!(page.text("document.activeElement.ariaLabel"), "Edit answer");
    page.eval("document.activeElement.select()");
    page.write("The sky is blue, ");
    // Enter is a line here; nothing is lost if one thinks better of it.
    page.press("Escape");
    assert_eq!(page.eval(TEXTS), json!(["Why?", "The sky is green."]));
    page.click("button[aria-label='Edit answer']");
    page.eval("document.activeElement.select()");
    page.write("The sky is blue, ");
    server.will([Reply::text("because of the air.", 4)]);
    page.click(".editor button:nth-of-type(2)");
    page.until(&format!("({TEXTS})[1] === 'The sky is blue, because of the air.'"));
    page.until_messages(2);
    page.until_kept(3);
    let sent = page.sent().remove(1);
    // The space at the end is part of it.
    assert_eq!(sent["messages"][1], json!({"role": "assistant", "content": "The sky is blue, "}));
    assert_eq!(sent["continue_final_message"], true);
    // The answer of before is another version; saved alone, nothing is asked.
    page.click(".assistant button[aria-label='Previous version']");
    assert_eq!(page.eval(TEXTS), json!(["Why?", "The sky is green."]));
    page.click("button[aria-label='Edit answer']");
    page.write("!");
    page.click(".editor .primary");
    page.until(&format!("({TEXTS})[1] === 'The sky is green.!'"));
    page.until_kept(4);
    assert_eq!(page.sent().len(), 2);
    page.reload();
    page.until_ready();
    assert_eq!(page.eval(TEXTS), json!(["Why?", "The sky is green.!"]));
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn the_model_goes_on_with_its_own_words() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("");
    page.open_ready(&server);
    page.eval("Settings.values.temperature = 0, Settings.values.max_tokens = 12");
    page.write("Tell me a story about a lighthouse.");
    page.press("Enter");
    page.until_messages(2);
    let text = "document.querySelector('.assistant .text').textContent";
    let begin = page.text(text);
    page.click("button[aria-label='Continue: answer']");
    page.until(&format!("{text}.length > {}", begin.len()));
    page.until_messages(2);
    let both = page.text(text);
    // What comes in two parts is what comes in one.
    page.eval("Settings.values.max_tokens = 24");
    page.click("button[aria-label='Regenerate: answer']");
    page.until("document.querySelector('.versions')?.textContent === '‹2 / 2›'");
    page.until_messages(2);
    assert_eq!(page.text(text), both);
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn how_far_the_prompt_is_read_is_shown() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("--max-num-seqs 2 --max-num-batched-tokens 16 --kernels reference");
    page.open_ready(&server);
    page.eval(
        "window.seen = new Set(), new MutationObserver(() => seen.add(document.querySelector('.assistant .numbers')?.textContent)) \
         .observe(document.querySelector('#log'), { childList: true, subtree: true, characterData: true }), 0",
    );
    page.eval("Settings.values.max_tokens = 4");
    page.write(&"word ".repeat(200));
    page.press("Enter");
    page.until_messages(2);
    let seen = page.eval("[...seen].filter((text) => text?.startsWith('Reading the prompt '))");
    let seen: Vec<&str> = seen.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert!(seen.len() > 2, "{seen:?}");
    for text in seen {
        let (read, all) = text["Reading the prompt ".len()..].split_once(" / ").unwrap();
        assert!(read.parse::<u32>().unwrap() < all.parse().unwrap(), "{text}");
    }
    assert!(!page.text("document.querySelector('.assistant .numbers').textContent").contains("Reading"));
}
