//! Tables for people, with columns as wide as their contents.

use unicode_width::UnicodeWidthStr;

/// Spaces between columns.
const GAP: usize = 3;

/// The lines of a table. All columns are aligned left, because they contain words too.
pub(crate) fn lines<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> Vec<String> {
    let rows: Vec<[&str; N]> =
        std::iter::once(head).chain(rows.iter().map(|row| row.each_ref().map(String::as_str))).collect();
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].width()).max().unwrap_or(0));
    let line = |row: &[&str; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| {
            let fill = width.saturating_sub(cell.width()) + GAP;
            format!("{cell}{}", " ".repeat(fill))
        });
        cells.collect::<String>().trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        let rows = [["a", "long word"], ["界", ""]].map(|row| row.map(str::to_owned));
        assert_eq!(super::lines(["A", "B"], &rows), ["A    B", "a    long word", "界"]);
    }
}
