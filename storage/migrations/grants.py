"""The application's role and what it may do; each migration calls these for the tables it creates.

The ledger connects as `onbelay_app`: it may read and add everything, and change what is no evidence. Migrations run as
the owner of the database. Roles belong to the whole server, and several databases may be migrated there at once.
"""

from alembic import op
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from storage.errors import APPLICATION_ROLE, RoleMissing

# Another database's migration may create the role or the membership between the question and the answer.
CREATE = f"""
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{APPLICATION_ROLE}') THEN
        BEGIN
            CREATE ROLE {APPLICATION_ROLE} NOLOGIN;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN
            NULL;
        END;
    END IF;
    IF NOT pg_has_role(
        current_user, '{APPLICATION_ROLE}',
        CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END
    ) THEN
        BEGIN
            GRANT {APPLICATION_ROLE} TO CURRENT_USER;
        EXCEPTION WHEN unique_violation THEN
            NULL;
        END;
    END IF;
END
$$
"""
INSUFFICIENT_PRIVILEGE = "42501"


def create_role() -> None:
    """Make sure that the role is there and that the migrating user may act as it, or raise RoleMissing."""
    connection = op.get_bind()
    try:
        connection.execute(text(CREATE))
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) != INSUFFICIENT_PRIVILEGE:
            raise
        url = connection.engine.url
        address = f"{url.host or 'localhost'}:{url.port or 5432}/{url.database}"
        raise RoleMissing(address, url.username or "", "the user may not create or grant it") from error


def grant_mutable(*tables: str) -> None:
    """Ordinary tables: the application reads, adds, changes and removes rows."""
    for table in tables:
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {APPLICATION_ROLE}")


def grant_lasting(*tables: str) -> None:
    """Rows that are changed and never removed: the application reads, adds and changes them."""
    for table in tables:
        op.execute(f"GRANT SELECT, INSERT, UPDATE ON {table} TO {APPLICATION_ROLE}")


def grant_readable(*tables: str) -> None:
    """Tables that only migrations write."""
    for table in tables:
        op.execute(f"GRANT SELECT ON {table} TO {APPLICATION_ROLE}")


def grant_append_only(*tables: str) -> None:
    """Evidence: the application reads and adds rows."""
    for table in tables:
        op.execute(f"GRANT SELECT, INSERT ON {table} TO {APPLICATION_ROLE}")
