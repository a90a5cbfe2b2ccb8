"""A conversation of one's own: whenever the policy ends a draft with `;`, a calculator adds up its digits."""


async def calculator(client, max_calls=2, **row):
    """`row`: messages, data_source, ground_truth and extra_info of the prompt."""
    call = client.tokenizer.encode(";")
    ids = client.prompt_ids
    for _ in range(max_calls):
        turn = await client.generate(ids, stop_ids=call)
        if turn.tokens[-1:] != call:
            return  # the policy has ended its response, or it is full
        said = client.tokenizer.decode(turn.tokens)
        ids = [*client.ids, *client.tokenizer.encode(f"{add_digits(said)};")]  # read by the policy, not trained
    await client.generate(ids)


def add_digits(text):
    return sum(int(character) for character in text if character in "0123456789")
