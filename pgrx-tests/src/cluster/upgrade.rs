//! pg_upgrade, as an administrator runs it.

use std::fs;
use std::path::Path;

use super::{Cluster, Mode, configure, template};
use crate::client::Sql;
use crate::process::server_program;
use crate::testbed::{give_to_server, new_folder, program};

impl Cluster {
    /// Stops this cluster and makes one of a later major version of it, which starts after `between`. Settings are those given, not the
    /// old ones.
    #[track_caller]
    pub fn upgrade(
        mut self,
        major: u32,
        settings: &[(&str, &str)],
        between: impl FnOnce(),
    ) -> Cluster {
        self.forget_versions_of_columns();
        self.stop(Mode::Fast);
        let folder = new_folder("c");
        give_to_server(&folder);
        let data = folder.join("data");
        // From version 18 on it is yes if nothing is said, and both must be alike.
        let arguments: &[&str] = if major >= 18 {
            &["--no-data-checksums"]
        } else {
            &[]
        };
        template::init(major, &data, arguments);
        let settings = settings
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        configure(&data, &settings.collect::<Vec<_>>());

        let bin = |major| {
            let postgres = program(major, "postgres");
            postgres.parent().expect("it is in a folder").to_owned()
        };
        let mut upgrade = server_program(major, "pg_upgrade");
        upgrade.current_dir(&folder);
        upgrade.arg("-b").arg(bin(self.major));
        upgrade.arg("-B").arg(bin(major));
        upgrade.arg("-d").arg(self.data()).arg("-D").arg(&data);
        upgrade.arg("-s").arg(&folder).args(["-U", "postgres"]);
        upgrade.args(["-p", &self.port.to_string()]);
        upgrade.args(["-P", &crate::ports::free().to_string()]);
        let output = upgrade.output().expect("pg_upgrade runs");
        assert!(
            output.status.success(),
            "pg_upgrade: {}\n{}",
            String::from_utf8_lossy(&output.stdout),
            logs(&data)
        );
        between();
        Self::run(major, folder)
    }

    /// Servers of late minor versions, such as 15.20, note an option `pg_attver` with each column. A server that is a little older does not
    /// know it, whatever its major version, and pg_upgrade to such a one fails with every table. Ours are what there is to be had.
    fn forget_versions_of_columns(&self) {
        let databases: Vec<String> = self
            .connect_to("postgres")
            .all("select datname::text from pg_database where datallowconn");
        for database in databases {
            self.connect_to(&database).run(
                "set allow_system_table_mods = on;
                 update pg_attribute a
                    set attoptions = nullif(array(select o from unnest(a.attoptions) o where o not like 'pg\\_attver=%'), '{}')
                  where a.attoptions::text like '%pg\\_attver=%'",
            );
        }
    }
}

/// The ends of what it has noted, file by file.
fn logs(data: &Path) -> String {
    let folders = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    let runs = folders(&data.join("pg_upgrade_output.d"));
    let files = runs.flat_map(|run| folders(&run.path().join("log")));
    let ends = files.map(|file| {
        let text = fs::read_to_string(file.path()).unwrap_or_default();
        let lines = text.lines().collect::<Vec<_>>();
        let end = lines[lines.len().saturating_sub(60)..].join("\n");
        format!("--- {}\n{end}\n", file.path().display())
    });
    ends.collect()
}
