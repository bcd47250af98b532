//! Parses a line of a chat as a question or a command. A line whose first word is `/` and letters is never a
//! question.

/// A line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry<'a> {
    Nothing,
    Question(&'a str),
    Command(Command<'a>),
    /// An unknown command or wrong arguments, with the message.
    Wrong(String),
}

/// A command for the program.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command<'a> {
    Quit,
    Help,
    Reset,
    Show,
    /// A setting and its value.
    Set(&'a str, &'a str),
    /// The new system message; `None` removes it.
    System(Option<&'a str>),
    /// A file that is inserted before the next question.
    Read(&'a str),
    Regenerate,
    Save(&'a str),
    Load(&'a str),
}

pub(super) const HELP: &str = "\
/set NAME VALUE   change a setting: temperature, top_p, max_tokens, seed, think … (/show lists them; none unsets)
/show             the model, the settings and the conversation
/system [TEXT]    change the system message, or go without one
/read FILE        put a file before the next question
/regen            answer the last question again
/save FILE        keep the conversation in a file
/load FILE        go on with one
/reset            forget the conversation, not the settings (also /clear)
/quit             leave (also /exit, /bye or Ctrl-D)
/help             show this (also /?)
\"\"\"               begins and ends a text of several lines; \\ at the end of a line or Alt-Enter continues it
Ctrl-C            stop the answer";

impl<'a> Entry<'a> {
    pub(super) fn parse(line: &'a str) -> Self {
        let line = line.trim();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let Some(name) = word.strip_prefix('/') else {
            return if line.is_empty() { Self::Nothing } else { Self::Question(line) };
        };
        // A question may begin with a path.
        if !name.chars().all(|letter| letter.is_alphabetic() || matches!(letter, '?' | '_' | '-')) {
            return Self::Question(line);
        }
        let text = (!rest.is_empty()).then_some(rest);
        let alone = |command| match text {
            None => Self::Command(command),
            Some(_) => Self::Wrong(format!("{word} takes no argument")),
        };
        let with_file = |command: fn(&'a str) -> Command<'a>| match text {
            Some(path) => Self::Command(command(path)),
            None => Self::Wrong(format!("{word} needs the name of a file")),
        };
        match name {
            "quit" | "exit" | "bye" | "q" => alone(Command::Quit),
            "help" | "?" | "" | "h" => alone(Command::Help),
            "reset" | "clear" | "new" => alone(Command::Reset),
            "regen" | "regenerate" | "retry" => alone(Command::Regenerate),
            // ollama's subjects of /show are ignored: everything is shown.
            "show" => Self::Command(Command::Show),
            "system" => Self::Command(Command::System(text)),
            "read" => with_file(Command::Read),
            "save" => with_file(Command::Save),
            "load" => with_file(Command::Load),
            "set" => match setting(rest) {
                Some((name, value)) => Self::Command(Command::Set(name, value)),
                None => Self::Wrong("/set needs a name and a value: /set temperature 0.5".to_owned()),
            },
            _ => Self::Wrong(format!("unknown command {word}; /help lists the commands")),
        }
    }
}

/// The name and the value of a setting, also in ollama's syntax: `parameter NAME VALUE`, `nothink`.
fn setting(text: &str) -> Option<(&str, &str)> {
    let text = text.strip_prefix("parameter ").map_or(text, str::trim_start);
    match text {
        "think" => return Some(("think", "on")),
        "nothink" => return Some(("think", "off")),
        _ => {}
    }
    let (name, value) = text.split_once(|letter: char| letter.is_whitespace() || letter == '=')?;
    let value = value.trim();
    (!value.is_empty()).then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_questions() {
        let check = |line: &str, expected: Entry<'_>| assert_eq!(Entry::parse(line), expected, "{line:?}");
        check("  ", Entry::Nothing);
        check(" Why? ", Entry::Question("Why?"));
        check("/etc/hosts is what?", Entry::Question("/etc/hosts is what?"));
        check("// is a comment?", Entry::Question("// is a comment?"));
        for line in ["/quit", " /exit ", "/bye"] {
            check(line, Entry::Command(Command::Quit));
        }
        for line in ["/help", "/?", "/"] {
            check(line, Entry::Command(Command::Help));
        }
        check("/reset", Entry::Command(Command::Reset));
        check("/clear", Entry::Command(Command::Reset));
        check("/show info", Entry::Command(Command::Show));
        check("/regen", Entry::Command(Command::Regenerate));
        check("/system  You are a cat. ", Entry::Command(Command::System(Some("You are a cat."))));
        check("/system", Entry::Command(Command::System(None)));
        check("/read my file.txt", Entry::Command(Command::Read("my file.txt")));
        check("/set temperature 0.5", Entry::Command(Command::Set("temperature", "0.5")));
        check("/set parameter top_k  40", Entry::Command(Command::Set("top_k", "40")));
        check("/set stop a b", Entry::Command(Command::Set("stop", "a b")));
        check("/set nothink", Entry::Command(Command::Set("think", "off")));
    }

    #[test]
    fn what_is_no_command_is_no_question_either() {
        for (line, words) in [
            ("/foo", "unknown command /foo"),
            ("/foo bar", "unknown command /foo"),
            ("/quit now", "takes no argument"),
            ("/read", "name of a file"),
            ("/set temperature", "a name and a value"),
            ("/set", "a name and a value"),
        ] {
            let Entry::Wrong(message) = Entry::parse(line) else { panic!("{line}") };
            assert!(message.contains(words), "{line}: {message}");
        }
    }
}
