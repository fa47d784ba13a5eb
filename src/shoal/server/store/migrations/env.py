"""Run by Alembic with the connection that `shoal.server.store.migrate` gives it."""

from alembic import context

from shoal.server.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
