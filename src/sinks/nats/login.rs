//! How a sink makes itself known to a server.

use serde_json::{Map, Value};

use super::nkey::UserKey;

/// What the value of the secret is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Auth {
    Token,
    /// `user:password`
    Password,
    /// The text of a `.creds` file: a JWT and the seed that belongs to it.
    Credentials,
    /// The seed of an NKey.
    Nkey,
}

/// One way in, made of one value of a secret.
pub(super) enum Login {
    Anonymous,
    Token(String),
    Password { user: String, password: String },
    Jwt { jwt: String, key: UserKey },
    Nkey(UserKey),
}

impl Login {
    /// # Errors
    /// When `value` is not what `auth` says it is; without quoting it.
    pub(super) fn new(auth: Auth, value: &str) -> Result<Self, &'static str> {
        match auth {
            Auth::Token => Ok(Login::Token(value.to_owned())),
            Auth::Password => match value.split_once(':') {
                Some((user, password)) => Ok(Login::Password {
                    user: user.to_owned(),
                    password: password.to_owned(),
                }),
                None => Err("is not of the form user:password"),
            },
            Auth::Credentials => {
                let jwt = section(value, "NATS USER JWT");
                let key = section(value, "USER NKEY SEED").and_then(UserKey::from_seed);
                match (jwt, key) {
                    (Some(jwt), Some(key)) => Ok(Login::Jwt {
                        jwt: jwt.to_owned(),
                        key,
                    }),
                    _ => Err("is not the text of a .creds file"),
                }
            }
            Auth::Nkey => UserKey::from_seed(value.trim())
                .map(Login::Nkey)
                .ok_or("is not the seed of a user's NKey"),
        }
    }

    /// Adds to what the client says of itself, signing the server's `nonce` where that is called for.
    ///
    /// # Errors
    /// When the server does not ask for a signature.
    pub(super) fn add_to(
        &self,
        connect: &mut Map<String, Value>,
        nonce: Option<&str>,
    ) -> Result<(), &'static str> {
        let mut add = |name: &str, value: &str| connect.insert(name.to_owned(), value.into());
        let asked = || nonce.ok_or("the server does not take NKeys: it sent no nonce");
        match self {
            Login::Anonymous => {}
            Login::Token(token) => {
                add("auth_token", token);
            }
            Login::Password { user, password } => {
                add("user", user);
                add("pass", password);
            }
            Login::Jwt { jwt, key } => {
                add("sig", &key.sign(asked()?));
                add("jwt", jwt);
            }
            Login::Nkey(key) => {
                add("sig", &key.sign(asked()?));
                add("nkey", &key.public());
            }
        }
        Ok(())
    }
}

/// What stands between the lines that begin and end a part of a `.creds` file. Their dashes vary in number.
fn section<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let marks = |line: &str, word: &str| {
        let title = line
            .trim()
            .strip_prefix("--")
            .and_then(|line| line.strip_suffix("--"));
        title.is_some_and(|line| line.trim_matches('-') == format!("{word} {name}"))
    };
    let mut lines = text.lines().skip_while(|line| !marks(line, "BEGIN"));
    lines.next()?;
    lines.map(str::trim).find(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";

    fn said(auth: Auth, value: &str) -> Map<String, Value> {
        let mut connect = Map::new();
        let login = Login::new(auth, value).unwrap();
        login.add_to(&mut connect, Some("nonce")).unwrap();
        connect
    }

    #[test]
    fn tokens_and_passwords() {
        assert_eq!(said(Auth::Token, "s3cr:et")["auth_token"], "s3cr:et");
        let connect = said(Auth::Password, "app:pass:word");
        assert_eq!(connect["user"], "app");
        assert_eq!(connect["pass"], "pass:word");
        assert!(Login::new(Auth::Password, "secret").is_err());
    }

    #[test]
    fn nkeys_and_credentials_sign() {
        let connect = said(Auth::Nkey, &format!(" {SEED}\n"));
        assert!(connect["nkey"].as_str().unwrap().starts_with("UDXU"));
        assert_eq!(connect["sig"].as_str().unwrap().len(), 86);

        let creds = format!(
            "-----BEGIN NATS USER JWT-----\neyJ0.eyJq.c2ln\n------END NATS USER JWT------\n\n\
             ************************* IMPORTANT *************************\n\n\
             -----BEGIN USER NKEY SEED-----\r\n{SEED}\r\n------END USER NKEY SEED------\n"
        );
        let connect = said(Auth::Credentials, &creds);
        assert_eq!(connect["jwt"], "eyJ0.eyJq.c2ln");
        assert_eq!(connect["sig"].as_str().unwrap().len(), 86);

        for wrong in [
            "",
            SEED,
            &creds.replace(SEED, "SU"),
            &creds.replace("JWT", "JWS"),
        ] {
            assert!(Login::new(Auth::Credentials, wrong).is_err());
        }
        assert!(Login::new(Auth::Nkey, "SU").is_err());
        let login = Login::new(Auth::Nkey, SEED).unwrap();
        assert!(login.add_to(&mut Map::new(), None).is_err());
    }
}
