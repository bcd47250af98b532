//! The files of the project, as the rules read them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) struct Source {
    /// Relative to the repository, with forward slashes.
    pub(crate) path: String,
    pub(crate) text: String,
    /// Line number and code of each line that is neither comment nor test.
    pub(crate) code: Vec<(usize, String)>,
}

impl Source {
    pub(crate) fn module(&self) -> &str {
        let name = self.path.strip_prefix("src/").unwrap_or(&self.path);
        name.split(['/', '.']).next().unwrap_or_default()
    }

    /// Whether it is the file or in the folder `module` of `src`.
    pub(crate) fn is_in(&self, module: &str) -> bool {
        let rest = self.path.strip_prefix("src/").and_then(|path| path.strip_prefix(module));
        rest.is_some_and(|rest| rest.starts_with(['/', '.']))
    }

    pub(crate) fn is_test(&self) -> bool {
        let stem = self.path.rsplit('/').next().unwrap_or_default();
        stem.ends_with("tests.rs") || stem.starts_with("test_") || self.path.contains("/tests/")
    }

    /// Lines that contain `word`, neither as part of a longer name nor in a string.
    pub(crate) fn lines_with<'a>(&'a self, word: &'a str) -> impl Iterator<Item = String> + 'a {
        let found = move |(_, line): &&(usize, String)| contains_word(line, word);
        self.code.iter().filter(found).map(move |(number, _)| format!("{}:{number}: {word}", self.path))
    }

    /// The modules of this crate that the code names.
    pub(crate) fn uses(&self) -> Vec<(usize, String)> {
        let mut uses = Vec::new();
        let all: String = self.code.iter().map(|(_, line)| format!("{line}\n")).collect();
        for (start, found) in all.match_indices("crate::") {
            if all[..start].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let number = self.code[all[..start].matches('\n').count()].0;
            let rest = &all[start + found.len()..];
            for name in first_segments(rest) {
                uses.push((number, name));
            }
        }
        uses
    }
}

/// `a::b` gives a; `{a::{b, c}, d}` gives a and d.
pub(crate) fn first_segments(rest: &str) -> Vec<String> {
    let name = |text: &str| -> String {
        text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let Some(group) = rest.strip_prefix('{') else { return vec![name(rest)] };
    let mut names = vec![name(group)];
    let mut depth = 1;
    for (position, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => names.push(name(&group[position + 1..])),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    names
}

pub(crate) fn contains_word(line: &str, word: &str) -> bool {
    let part_of_name = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(start, _)| {
        let end = start + word.len();
        let closed = !part_of_name(word.chars().next_back());
        !part_of_name(line[..start].chars().next_back())
            && (closed || !part_of_name(line[end..].chars().next()))
    })
}

/// The line without a comment and without what is in string literals.
pub(crate) fn strip(line: &str) -> String {
    let mut stripped = String::new();
    let mut characters = line.chars().peekable();
    let mut in_string = false;
    while let Some(character) = characters.next() {
        match character {
            '\\' if in_string => {
                characters.next();
            }
            '\'' if !in_string && characters.peek() == Some(&'"') => {
                characters.next();
            }
            '"' => {
                in_string = !in_string;
                stripped.push('"');
            }
            '/' if !in_string && characters.peek() == Some(&'/') => break,
            _ if in_string => {}
            _ => stripped.push(character),
        }
    }
    stripped
}

/// The code of a file up to its tests module, which by the house style comes last.
pub(crate) fn code_of(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let is_tests = |index: usize| {
        lines[index].trim() == "#[cfg(test)]"
            && lines.get(index + 1).is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'))
    };
    let end = (0..lines.len()).find(|&index| is_tests(index)).unwrap_or(lines.len());
    lines[..end].iter().enumerate().map(|(index, line)| (index + 1, strip(line))).collect()
}

pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

pub(crate) fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" {
            walk(&path, found);
        } else if path.is_file() {
            found.push(path);
        }
    }
}

pub(crate) fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/")
}

pub(crate) fn sources() -> Vec<Source> {
    let mut paths = Vec::new();
    walk(&root().join("src"), &mut paths);
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    paths.sort();
    assert!(paths.len() > 20, "only {} source files found", paths.len());
    paths
        .iter()
        .map(|path| {
            let text = fs::read_to_string(path).unwrap();
            Source { path: relative(path), code: code_of(&text), text }
        })
        .collect()
}

/// What is under version control; in an unpacked archive, everything that is not hidden.
pub(crate) fn tracked_files() -> Vec<String> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    if let Ok(output) = listed
        && output.status.success()
        && !output.stdout.is_empty()
    {
        let names = String::from_utf8(output.stdout).unwrap();
        return names
            .split_terminator('\0')
            .map(str::to_owned)
            .filter(|name| root().join(name).is_file())
            .collect();
    }
    let mut paths = Vec::new();
    walk(&root(), &mut paths);
    paths.iter().map(|path| relative(path)).filter(|path| !path.starts_with('.')).collect()
}

#[track_caller]
pub(crate) fn none(rule: &str, violations: impl IntoIterator<Item = String>) {
    let violations: Vec<String> = violations.into_iter().collect();
    assert!(violations.is_empty(), "{rule}:\n  {}", violations.join("\n  "));
}
