//! Redraws the screen of a terminal.
//!
//! All output goes to the alternate screen, so the former contents reappear at the end of the program. A
//! frame is one write between the terminal's marks for synchronised output, and each line is cleared only
//! after its text. So nothing flickers.

use std::io::{self, Write};

use terminal_size::{Height, Width, terminal_size};

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The alternate screen, left on drop.
#[derive(Debug)]
pub(super) struct Terminal {
    output: io::Stdout,
}

impl Terminal {
    /// # Errors
    /// If the terminal cannot be written to.
    pub(super) fn enter() -> io::Result<Self> {
        let mut output = io::stdout();
        output.write_all(ENTER.as_bytes())?;
        output.flush()?;
        Ok(Self { output })
    }

    /// The current number of columns and rows.
    pub(super) fn size() -> (usize, usize) {
        terminal_size().map_or((80, 24), |(Width(width), Height(height))| (width.into(), height.into()))
    }

    /// Draws these lines, which must fit.
    ///
    /// # Errors
    /// If the terminal cannot be written to.
    pub(super) fn draw(&mut self, lines: &[String]) -> io::Result<()> {
        self.output.write_all(frame(lines).as_bytes())?;
        self.output.flush()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // This fails only if the terminal is gone.
        let _ = self.output.write_all(LEAVE.as_bytes()).and_then(|()| self.output.flush());
    }
}

fn frame(lines: &[String]) -> String {
    let mut frame = "\x1b[?2026h\x1b[H".to_owned();
    for (index, line) in lines.iter().enumerate() {
        frame.push_str(if index > 0 { "\r\n" } else { "" });
        frame.push_str(line);
        frame.push_str("\x1b[K");
    }
    frame.push_str("\x1b[J\x1b[?2026l");
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_never_clears_before_it_writes() {
        let lines = ["a", "b"].map(str::to_owned);
        assert_eq!(frame(&lines), "\x1b[?2026h\x1b[Ha\x1b[K\r\nb\x1b[K\x1b[J\x1b[?2026l");
    }
}
