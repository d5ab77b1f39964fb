"""alembic's entry: runs migrations on the connection that `storage.migrate` hands over, inside its transaction."""

from alembic import context

from storage.models.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
