//! What is charged for JSON is what it takes: at least what the allocator gives for it, and not much more.
//!
//! The program has one test, because the counter counts for the whole process.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use tinyvllm_server::read_charged;

/// The system's allocator, counting the bytes that are in use.
struct Counting;

static NUM_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's guarantees.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NUM_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's guarantees.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A list of this many copies of a text.
fn list(item: &str, count: usize) -> String {
    format!("[{}]", vec![item; count].join(","))
}

/// An object of this many fields, each of which has this value.
fn object(value: &str, count: usize) -> String {
    let fields: Vec<String> = (0..count).map(|index| format!("\"k{index}\":{value}")).collect();
    format!("{{{}}}", fields.join(","))
}

/// The charge for a text, in addition to its size.
fn charged_and_taken(text: &str) -> (usize, usize) {
    let before = NUM_BYTES.load(Ordering::Relaxed);
    let (value, charged) = read_charged(text.as_bytes(), 1 << 40).unwrap();
    let taken = NUM_BYTES.load(Ordering::Relaxed) - before;
    drop(value);
    (charged, taken)
}

#[test]
fn values_are_charged_as_they_are_allocated() {
    let long = format!("\"{}\"", "x".repeat(100_000));
    let nested = format!("{}{}", "[".repeat(100), "]".repeat(100));
    let mut shapes = Vec::new();
    for item in [
        "[]",
        "{}",
        "{\"a\":1}",
        "[0]",
        "[0,0]",
        "0",
        "1.5",
        "null",
        "\"\"",
        "\"a\"",
        "\"0123456789012345678901234\"",
        "{\"a\":{\"a\":1}}",
        "{\"a\":1,\"b\":2,\"c\":3,\"d\":[4]}",
        "[[[1]],{\"\\u00e9\":\"\\n\"}]",
        &nested,
        &long,
    ] {
        shapes.extend([1, 2, 3, 100, 1_000].map(|count| list(item, count)));
    }
    for count in (1..20).chain([27, 28, 29, 56, 57, 111, 112, 113, 1_000, 14_336, 14_337, 100_000]) {
        shapes.extend([
            object("0", count),
            object("[]", count),
            list(&object("{\"a\":\"b\"}", count.min(200)), 9),
        ]);
    }
    for text in shapes {
        let (charged, taken) = charged_and_taken(&text);
        let shape = format!("{} bytes, {}", text.len(), text.chars().take(60).collect::<String>());
        assert!(charged >= taken, "{charged} is charged of {taken}: {shape}");
        // The least allocation of the system is 32 bytes.
        assert!(charged <= 2 * taken + 64, "{charged} is charged for {taken}: {shape}");
    }
    // What does not fit is refused before it is there.
    let bomb = list("{\"a\":1}", 500_000);
    let before = NUM_BYTES.load(Ordering::Relaxed);
    let error = read_charged(bomb.as_bytes(), 1 << 20).unwrap_err().to_string();
    assert!(error.contains("--max-request-memory"), "{error}");
    assert!(NUM_BYTES.load(Ordering::Relaxed) - before < 4_096);
}
