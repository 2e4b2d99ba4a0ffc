//! A measured figure, and the table of all of them.

use std::fmt;

/// What a figure is meant to reach.
#[derive(Clone, Copy)]
enum Aim {
    AtLeast(f64),
    AtMost(f64),
}

/// One row of the table.
pub(crate) struct Line {
    what: String,
    value: f64,
    unit: &'static str,
    aim: Option<Aim>,
    note: String,
    /// Private memory of the dispatcher at the end, in kB.
    memory: Option<u64>,
    /// Cores that other programs had meanwhile.
    others: Option<f64>,
}

impl Line {
    pub(crate) fn new(what: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self {
            what: what.into(),
            value,
            unit,
            aim: None,
            note: String::new(),
            memory: None,
            others: None,
        }
    }

    pub(crate) fn at_least(mut self, aim: f64) -> Self {
        self.aim = Some(Aim::AtLeast(aim));
        self
    }

    pub(crate) fn at_most(mut self, aim: f64) -> Self {
        self.aim = Some(Aim::AtMost(aim));
        self
    }

    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    pub(crate) fn memory(mut self, kilobytes: u64) -> Self {
        self.memory = Some(kilobytes);
        self
    }

    pub(crate) fn others(mut self, cores: f64) -> Self {
        self.others = Some(cores);
        self
    }

    fn columns(&self) -> [String; 7] {
        let (aim, reached) = match self.aim {
            None => (String::new(), String::new()),
            Some(Aim::AtLeast(aim)) => (format!(">= {}", number(aim)), tick(self.value >= aim)),
            Some(Aim::AtMost(aim)) => (format!("<= {}", number(aim)), tick(self.value <= aim)),
        };
        [
            self.what.clone(),
            format!("{} {}", number(self.value), self.unit),
            aim,
            reached,
            self.memory
                .map(|kilobytes| format!("{:.1} MB", kilobytes as f64 / 1024.0))
                .unwrap_or_default(),
            self.others
                .map(|cores| format!("{cores:.1}"))
                .unwrap_or_default(),
            self.note.clone(),
        ]
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [what, value, aim, reached, memory, others, note] = self.columns();
        write!(f, "{what}: {value}")?;
        for (name, column) in [
            ("aim", format!("{aim} {reached}")),
            ("memory", memory),
            ("others", others),
            ("", note),
        ] {
            if !column.trim().is_empty() {
                write!(f, "; {name} {}", column.trim())?;
            }
        }
        Ok(())
    }
}

fn tick(reached: bool) -> String {
    if reached { "yes" } else { "no" }.to_owned()
}

/// Three digits that say something, and thousands apart.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1_000.0 => {
            let digits = format!("{value:.0}");
            let mut grouped = String::new();
            for (index, digit) in digits.chars().enumerate() {
                if index > 0 && (digits.len() - index).is_multiple_of(3) {
                    grouped.push(',');
                }
                grouped.push(digit);
            }
            grouped
        }
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// All lines as a table in Markdown, columns aligned.
pub(crate) fn table(lines: &[Line]) -> String {
    let head = [
        "figure",
        "measured",
        "aim",
        "met",
        "dispatcher's memory",
        "cores of others",
        "notes",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(lines.iter().map(Line::columns));
    let widths = std::array::from_fn::<_, 7, _>(|column| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    });
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (cell, &width) in row.iter().zip(&widths) {
            text.push_str(&format!("| {cell:<width$} "));
        }
        text.push_str("|\n");
        if index == 0 {
            for width in widths {
                text.push_str(&format!("|{}", "-".repeat(width + 2)));
            }
            text.push_str("|\n");
        }
    }
    text
}
