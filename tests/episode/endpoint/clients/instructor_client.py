import instructor
from openai import OpenAI
from pydantic import BaseModel, field_validator


class Sums(BaseModel):
    first: int
    second: int

    @field_validator("first")
    @classmethod
    def check_first(cls, first: int) -> int:
        if first != 3:
            raise ValueError("1 and 2 are 3")
        return first

    @field_validator("second")
    @classmethod
    def check_second(cls, second: int) -> int:
        if second != 7:
            raise ValueError("3 and 4 are 7")
        return second


client = instructor.from_openai(OpenAI())
messages = [{"role": "user", "content": "Add 1 and 2, then 3 and 4."}]
sums = client.create(model="policy", messages=messages, response_model=Sums)
print(f"The sums are {sums.first} and {sums.second}.")
