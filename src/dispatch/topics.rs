//! Topic patterns: `*` stands for one segment, `>` for the rest, segments are separated by dots.

use std::fmt;

/// One pattern, such as `order.*` or `outbox.public.>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(Vec<Segment>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Exactly(String),
    One,
    Rest,
}

/// What is wrong with a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatternError {
    Empty,
    EmptySegment,
    RestNotLast,
    WildcardInSegment,
}

impl fmt::Display for PatternError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "It is empty.",
            Self::EmptySegment => "It has an empty segment.",
            Self::RestNotLast => "\">\" stands for the rest and can only be the last segment.",
            Self::WildcardInSegment => "\"*\" and \">\" stand for whole segments.",
        })
    }
}

impl Pattern {
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        if text.is_empty() {
            return Err(PatternError::Empty);
        }
        let last = text.split('.').count() - 1;
        let segment = |(index, segment): (usize, &str)| match segment {
            "" => Err(PatternError::EmptySegment),
            "*" => Ok(Segment::One),
            ">" if index == last => Ok(Segment::Rest),
            ">" => Err(PatternError::RestNotLast),
            other if other.contains(['*', '>']) => Err(PatternError::WildcardInSegment),
            other => Ok(Segment::Exactly(other.to_owned())),
        };
        text.split('.')
            .enumerate()
            .map(segment)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    pub fn matches(&self, topic: &str) -> bool {
        let mut rest = topic.split('.');
        for segment in &self.0 {
            let Some(part) = rest.next() else {
                return false;
            };
            match segment {
                Segment::Exactly(wanted) if wanted != part => return false,
                Segment::Rest => return true,
                Segment::Exactly(_) | Segment::One => {}
            }
        }
        rest.next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_segment_by_segment() {
        for (pattern, topic, hit) in [
            ("order.placed", "order.placed", true),
            ("order.placed", "order.placed.late", false),
            ("order.*", "order.placed", true),
            ("order.*", "order", false),
            ("order.*", "order.placed.late", false),
            ("*.placed", "order.placed", true),
            ("order.>", "order.placed.late", true),
            ("order.>", "order", false),
            (">", "anything.at.all", true),
            ("*", "one", true),
            ("order.*.>", "order.a", false),
            ("order.*.>", "order.a.b", true),
        ] {
            assert_eq!(
                Pattern::parse(pattern).unwrap().matches(topic),
                hit,
                "{pattern} on {topic}"
            );
        }
    }

    #[test]
    fn says_what_is_wrong() {
        assert_eq!(Pattern::parse(""), Err(PatternError::Empty));
        assert_eq!(Pattern::parse("a..b"), Err(PatternError::EmptySegment));
        assert_eq!(Pattern::parse("a.>.b"), Err(PatternError::RestNotLast));
        assert_eq!(Pattern::parse("a.b*"), Err(PatternError::WildcardInSegment));
    }
}
