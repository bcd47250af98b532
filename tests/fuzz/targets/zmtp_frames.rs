//! Any bytes as those of a ZeroMQ peer, in chunks: an error, or frames that were in them and commands that can be read,
//! in a bounded memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tinyvllm_server::zmtp::{Broken, Command, MAX_FRAME_BYTES, Reader};

/// Takes what is complete. Returns whether there was a greeting, and how many bytes the frames had.
fn take(reader: &mut Reader, is_greeted: &mut bool) -> Result<usize, Broken> {
    if !*is_greeted {
        *is_greeted = reader.greeting()?;
    }
    let mut num_bytes = 0;
    while *is_greeted {
        let Some(frame) = reader.frame()? else { break };
        assert!(frame.body.len() <= MAX_FRAME_BYTES && !(frame.is_command && frame.has_more));
        num_bytes += frame.body.len() + 2;
        if frame.is_command {
            // One that cannot be read is an error, and no panic.
            let _ = Command::read(frame.body);
        }
    }
    Ok(num_bytes)
}

fuzz_target!(|input: &[u8]| {
    // The first byte says how long the chunks are.
    let Some((&first, mut bytes)) = input.split_first() else { return };
    let chunk = usize::from(first) * 19 + 1;
    let (mut reader, mut is_greeted, mut num_taken) = (Reader::default(), false, 0);
    let num_bytes = reader.num_bytes();
    while !bytes.is_empty() {
        let space = reader.space();
        assert!(!space.is_empty(), "what is not complete leaves space");
        let length = chunk.min(space.len()).min(bytes.len());
        space[..length].copy_from_slice(&bytes[..length]);
        reader.filled(length);
        bytes = &bytes[length..];
        match take(&mut reader, &mut is_greeted) {
            Ok(taken) => num_taken += taken,
            Err(_) => return,
        }
        assert_eq!(reader.num_bytes(), num_bytes);
    }
    assert!(num_taken <= input.len());
});
