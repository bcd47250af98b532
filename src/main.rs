//! The command line: parses, runs, and turns an error into a message and an exit code.

fn main() {}
