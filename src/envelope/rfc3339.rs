//! Times as RFC 3339 in UTC.

const MICROS_PER_SECOND: i64 = 1_000_000;
const SECONDS_PER_DAY: i64 = 86_400;
/// 0001-01-01T00:00:00Z: RFC 3339 knows no year of other than four digits, and year 0 is 1 BC.
const EARLIEST: i64 = -62_135_596_800 * MICROS_PER_SECOND;
/// 9999-12-31T23:59:59.999999Z.
const LATEST: i64 = 253_402_300_800 * MICROS_PER_SECOND - 1;

/// Appends `micros` (since the Unix epoch) as `2026-01-31T12:00:00Z`, with six decimals when they are not all zero.
///
/// What RFC 3339 cannot say (years before 1 and after 9999, the infinities) becomes the nearest time that it can.
pub(super) fn write(micros: i64, out: &mut Vec<u8>) {
    let micros = micros.clamp(EARLIEST, LATEST);
    let seconds = micros.div_euclid(MICROS_PER_SECOND);
    let fraction = micros.rem_euclid(MICROS_PER_SECOND);
    let (year, month, day) = date(seconds.div_euclid(SECONDS_PER_DAY));
    let second = seconds.rem_euclid(SECONDS_PER_DAY);

    digits(year, 4, out);
    out.push(b'-');
    digits(month, 2, out);
    out.push(b'-');
    digits(day, 2, out);
    out.push(b'T');
    digits(second / 3600, 2, out);
    out.push(b':');
    digits(second / 60 % 60, 2, out);
    out.push(b':');
    digits(second % 60, 2, out);
    if fraction != 0 {
        out.push(b'.');
        digits(fraction, 6, out);
    }
    out.push(b'Z');
}

/// A time as text that Postgres reads as the same one: also the infinities, which are the extremes.
pub(crate) fn timestamp_text(micros: i64) -> String {
    match micros {
        i64::MIN => "-infinity".to_owned(),
        i64::MAX => "infinity".to_owned(),
        _ => {
            let mut text = Vec::new();
            write(micros, &mut text);
            String::from_utf8_lossy(&text).into_owned()
        }
    }
}

/// The proleptic Gregorian date of a day since the Unix epoch, reckoned in 400-year eras of years that begin in March, so
/// that the leap day comes last (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn date(day: i64) -> (i64, i64, i64) {
    let day = day + 719_468;
    let era = day.div_euclid(146_097);
    let of_era = day.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, of_year - (153 * from_march + 2) / 5 + 1)
}

fn digits(mut value: i64, width: usize, out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + width, b'0');
    for digit in out[start..].iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(micros: i64) -> String {
        let mut out = Vec::new();
        write(micros, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn known_times() {
        for (micros, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59.999999Z"),
            (951_782_400_000_000, "2000-02-29T00:00:00Z"),
            (4_107_542_399_000_000, "2100-02-28T23:59:59Z"),
            (1_700_000_000_000_120, "2023-11-14T22:13:20.000120Z"),
            (1_700_000_000_500_000, "2023-11-14T22:13:20.500000Z"),
        ] {
            assert_eq!(text(micros), expected);
        }
    }

    #[test]
    fn what_has_no_rfc_3339_form_is_clamped() {
        assert_eq!(text(i64::MIN), "0001-01-01T00:00:00Z");
        assert_eq!(text(EARLIEST - 1), "0001-01-01T00:00:00Z");
        assert_eq!(text(EARLIEST), "0001-01-01T00:00:00Z");
        assert_eq!(text(LATEST), "9999-12-31T23:59:59.999999Z");
        assert_eq!(text(LATEST + 1), "9999-12-31T23:59:59.999999Z");
        assert_eq!(text(i64::MAX), "9999-12-31T23:59:59.999999Z");
    }

    proptest::proptest! {
        #[test]
        fn an_independent_parser_reads_the_same_instant(
            micros in EARLIEST..=jiff::Timestamp::MAX.as_microsecond()
        ) {
            let read: jiff::Timestamp = text(micros).parse().unwrap();
            proptest::prop_assert_eq!(read.as_microsecond(), micros);
        }
    }
}
