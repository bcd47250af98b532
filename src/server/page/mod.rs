//! The chat page: one document that includes its style and its script and loads nothing else.
//!
//! It needs no key even if the server has keys, because a browser cannot send one when it opens a page. So it
//! is the same for all clients and knows nothing about the model: it requests everything from paths that need
//! the key. Its policy allows only this style and this script, and requests to this server only. No script
//! can turn text into markup.

use std::sync::LazyLock;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;

use super::access::new_id;
use super::error::ok_as;

const DOCUMENT: &str = include_str!("index.html");
const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = concat!(
    "\"use strict\";\n",
    include_str!("symbols.js"),
    include_str!("commands.js"),
    include_str!("formula.js"),
    include_str!("inline.js"),
    include_str!("colour.js"),
    include_str!("markdown.js"),
    include_str!("kept.js"),
    include_str!("server.js"),
    include_str!("conversation.js"),
    include_str!("imports.js"),
    include_str!("library.js"),
    include_str!("answers.js"),
    include_str!("files.js"),
    include_str!("message.js"),
    include_str!("composer.js"),
    include_str!("scroll.js"),
    include_str!("news.js"),
    include_str!("sidebar.js"),
    include_str!("settings.js"),
    include_str!("naming.js"),
    include_str!("panel.js"),
    include_str!("shortcuts.js"),
    include_str!("chat.js"),
);

/// The document including style and script, split where the nonce is inserted.
static PARTS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let parts = DOCUMENT.split("{{nonce}}");
    parts.map(|part| part.replace("{{style}}", STYLE).replace("{{script}}", SCRIPT)).collect()
});

/// Returns the page.
pub(super) async fn show() -> Response {
    let nonce = new_id();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'; trusted-types 'none'"
    );
    let mut response = ok_as("text/html; charset=utf-8", Body::from(PARTS.join(&nonce)));
    let headers = response.headers_mut();
    // Hexadecimal digits are valid in a header.
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    let fixed = [
        // A cached page would have an old nonce.
        (header::CACHE_CONTROL.as_str(), "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS.as_str(), "nosniff"),
        (header::REFERRER_POLICY.as_str(), "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_in_order() {
        let page = PARTS.join("0123");
        assert_eq!(PARTS.len(), 3, "a nonce for the style and one for the script");
        assert!(!page.contains("{{") && page.matches("nonce=\"0123\"").count() == 2);
        for (name, part) in [("style", STYLE), ("script", SCRIPT)] {
            // A closing tag inside would end the element.
            assert!(page.contains(part) && !part.contains(&format!("</{name}")));
        }
    }

    #[test]
    fn the_page_has_no_way_to_make_markup_of_text_and_no_address_outside() {
        for name in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "setHTML"] {
            assert!(!SCRIPT.contains(name), "{name}");
        }
        for (name, part) in [("style", STYLE), ("script", SCRIPT), ("document", DOCUMENT)] {
            let outside = part.match_indices("://").filter(|(at, _)| {
                // A namespace is only a name, and the scripts contain patterns for addresses in texts.
                !part[*at..].starts_with("://www.w3.org/2000/svg") && name != "script"
            });
            assert_eq!(outside.count(), 0, "{name}");
        }
    }
}
