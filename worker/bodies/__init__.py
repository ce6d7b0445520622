"""What a request's body may say: for every call its fields, each with the values that it takes, as JSON Schema.

The readers in `worker.fields` take their types and ranges from here and know no field that is not, and the description
of the API is written from the same tables: neither can say what the other does not.

Law: standard library only; the router reads this through `worker.routes`.
"""
